"""A judging model's server in this process, for tests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Endpoint:
    """A chat server on localhost that gives the answers it is told to, as (status, body)."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.requests: list[dict[str, Any]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                key = self.headers.get("Authorization")
                endpoint.requests.append({"path": self.path, "body": body, "key": key})
                status, answer = endpoint.answers.pop(0)
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def says(self, *texts: str) -> None:
        self.answers += [(200, json.dumps({"choices": [{"message": {"content": t}}]}).encode()) for t in texts]


@contextlib.contextmanager
def serving() -> Iterator[Endpoint]:
    """An endpoint that answers while the context lasts."""
    made = Endpoint()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()
