"""What processes tell one another on the host: small numbers before each step, and results after.

The channel is a TCP connection from every process to process 0, apart from the devices: a message costs a tenth of what
a collective of one number does, does not queue behind the step that runs, and knows who does not answer. A process that
dies closes its connection and is noticed at once, one that is frozen or cut off after SILENCE_S, and one that lives but
does not get on after the time given; then every process says which it was, and ends (GRACE_S).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from di_jax.errors import UserError

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # between two signs of life
SILENCE_S = 15.0  # without one: a process that computes in Python still sends them, from a thread
GRACE_S = 5.0  # to come to an end by oneself after a failure; the main thread may be inside a device call for ever
MEETING_S = 60.0  # for all processes to connect

_HEADER = struct.Struct("!BQ")  # kind, bytes that follow
_BEAT, _VALUES, _FAILED, _LEFT = range(4)
_PIECE = 1 << 20


class ProcessError(UserError):
    """Another process of this run is gone, or does something else; the message names it."""

    exit_code = 1


class Agreement:
    """Of a run of one process: everything is free. `ProcessGroup` is that of several; calls are collective there: every
    process makes the same ones in the same order."""

    process_id, num_processes = 0, 1
    work: str | None = None  # what all processes do together now

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes results."""
        return self.process_id == 0

    def gather(self, values: np.ndarray, what: str) -> np.ndarray:
        """The values [n] of every process, [processes, n] with the same dtype. what: names the call in messages."""
        return values[None]

    def sum(self, values: np.ndarray, what: str = "a sum") -> np.ndarray:
        """The sum over all processes, in the same shape and dtype."""
        return values

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """The payload of every process, in their order, in every process."""
        return [payload]

    def collect(self, payload: bytes, what: str) -> list[bytes]:
        """The payload of every process in process 0; an empty list in the others, which do not wait."""
        return [payload]

    def working(self, what: str | None) -> None:
        """Sets `work`, None when there is nothing to do. A process that ends during work fails the others, and so does
        one that does not get on, after the time given."""

    @property
    def lost(self) -> str | None:
        """What another process did, or did not do, that this one cannot go on without; None when all is well."""
        return None

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process cannot go on, so that they end too. An error of the device is often the
        death of another process; if so, that is what counts."""

    def leave(self) -> None:
        """Waits until all processes are through; one that ends without fails the others. Raises ProcessError when the
        run has failed."""


class ProcessGroup(Agreement):
    """Of several processes, over the connections of `meet`.

    peers: connection by process; process 0 has one to each, the others only to 0. names: of all, for messages.
    timeout_s: the longest that living processes may keep others waiting; loading and compiling count. end: ends this
    process, with an exit code, when it does not do so itself.
    """

    def __init__(
        self,
        process_id: int,
        peers: dict[int, socket.socket],
        names: Sequence[str],
        timeout_s: float,
        end: Callable[[int], None],
    ) -> None:
        self.process_id, self.num_processes = process_id, len(names)
        self.names, self.timeout_s = list(names), timeout_s
        self._peers, self._end = peers, end
        self._inbox: dict[int, queue.SimpleQueue[tuple[int, bytes]]] = {peer: queue.SimpleQueue() for peer in peers}
        self._sending = {peer: threading.Lock() for peer in peers}
        self._state = threading.Lock()
        self._failure: str | None = None
        self._is_lost = threading.Event()
        self._left = threading.Event()
        self.working("start-up")
        for peer, connection in peers.items():
            connection.settimeout(SILENCE_S)
            threading.Thread(target=self._read, args=(peer,), name=f"from-process-{peer}", daemon=True).start()
        threading.Thread(target=self._beat, name="signs-of-life", daemon=True).start()

    @classmethod
    def meet(
        cls,
        process_id: int,
        num_processes: int,
        share: Callable[[bytes], Sequence[bytes]],
        *,
        hosts: Sequence[str] = (),
        timeout_s: float = 600.0,
        end: Callable[[int], None] | None = None,
    ) -> ProcessGroup:
        """Connects the processes. Collective.

        share: gives every process the bytes of all, once. hosts: names under which process 0 can be reached, tried
        before those that it knows of itself; a loopback name keeps its port closed to other machines. Raises
        ProcessError for processes that cannot connect in MEETING_S.
        """
        server = None
        card = {"host": socket.gethostname(), "pid": os.getpid(), "hosts": [*hosts, *_own_hosts()]}
        try:
            if process_id == 0:
                server = _listen(local=bool(hosts) and all(map(_is_loopback, hosts)))
                card |= {"port": server.getsockname()[1], "token": secrets.token_hex(16)}
            cards = [json.loads(shared) for shared in share(json.dumps(card).encode())]
            names = [f"process {index} (pid {c['pid']} on {c['host']})" for index, c in enumerate(cards)]
            token = bytes.fromhex(cards[0]["token"])
            if server is not None:
                peers = _accept(server, token, names)
            else:
                peers = {0: _connect(cards[0]["hosts"], cards[0]["port"], token, process_id, names[0])}
        finally:
            if server is not None:
                server.close()
        return cls(process_id, peers, names, timeout_s, end_process if end is None else end)

    def gather(self, values: np.ndarray, what: str) -> np.ndarray:
        joined = self._round(what, values.tobytes(), b"".join)
        return np.frombuffer(joined, values.dtype).reshape(self.num_processes, *values.shape)

    def sum(self, values: np.ndarray, what: str = "a sum") -> np.ndarray:
        def total(parts: Sequence[bytes]) -> bytes:
            arrays = (np.frombuffer(part, values.dtype) for part in parts)
            return sum(arrays, np.zeros(values.size, values.dtype)).tobytes()

        return np.frombuffer(self._round(what, values.tobytes(), total), values.dtype).reshape(values.shape)

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        def packed(parts: Sequence[bytes]) -> bytes:
            return b"".join([np.array([len(part) for part in parts], np.int64).tobytes(), *parts])

        answer = self._round(what, payload, packed)
        head = 8 * self.num_processes
        ends = head + np.cumsum(np.frombuffer(answer[:head], np.int64))
        return [answer[start:end] for start, end in zip([head, *ends[:-1]], ends, strict=True)]

    def collect(self, payload: bytes, what: str) -> list[bytes]:
        with self._telling():
            if self.process_id:
                self._check()
                self._send(0, _VALUES, _labelled(what, payload))
                return []
            return self._parts(what, payload)

    def working(self, what: str | None) -> None:
        self.work, self._since = what, time.monotonic()

    @property
    def lost(self) -> str | None:
        return self._failure if self._is_lost.is_set() else None

    def fail(self, error: BaseException) -> None:
        if self._failure is None and isinstance(error, Exception) and not isinstance(error, UserError):
            self._is_lost.wait(2 * BEAT_S)
        if self._note(f"this process failed: {_reason(error)}"):
            self._tell(_FAILED, f"{self.names[self.process_id]} failed: {_reason(error)}".encode())

    def leave(self) -> None:
        if self._left.is_set():
            return
        self._check()
        self.working(None)
        with self._telling():
            if self.process_id:
                self._tell(_LEFT)
            for peer in self._peers:
                kind, data = self._inbox[peer].get()
                self._check()
                if kind != _LEFT:
                    raise ProcessError(f"{self.names[peer]} goes on ({_label(data)}), {self._me} has finished")
            self._left.set()
            if not self.process_id:
                self._tell(_LEFT)
        for connection in self._peers.values():
            connection.close()

    @property
    def _me(self) -> str:
        return f"process {self.process_id}"

    def _round(self, what: str, payload: bytes, combine: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """What process 0 makes of all payloads."""
        with self._telling():
            if self.process_id == 0:
                answer = combine(self._parts(what, payload))
                self._tell(_VALUES, answer)
                return answer
            self._check()
            self._send(0, _VALUES, _labelled(what, payload))
            # Process 0 waits as long for all others, and its message says who it was: leave it the time to.
            return self._take(0, what, time.monotonic() + self.timeout_s + GRACE_S)

    def _parts(self, what: str, payload: bytes) -> list[bytes]:
        """In process 0: the payloads of all. Raises ProcessError, naming all that have not answered in time."""
        self._check()
        parts, deadline, missing = [payload], time.monotonic() + self.timeout_s, []
        for peer in self._peers:
            try:
                answer = self._take(peer, what, deadline)
            except queue.Empty:
                missing.append(self.names[peer])
                continue
            if (label := _label(answer)) != what:
                raise ProcessError(f"{self.names[peer]} is at {label!r}, {self._me} at {what!r}: all must do the same")
            parts.append(answer[len(label.encode()) + 1 :])
        if missing:
            raise ProcessError(f"no answer for {self.timeout_s:g} s ({what}) from {', '.join(missing)}")
        return parts

    def _take(self, peer: int, what: str, deadline: float) -> bytes:
        try:
            kind, data = self._inbox[peer].get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            if self.process_id == 0:
                raise
            raise ProcessError(f"no answer for {self.timeout_s:g} s ({what}) from {self.names[peer]}") from None
        self._check()
        if kind == _LEFT:
            raise ProcessError(f"{self.names[peer]} has finished, {self._me} waits for it ({what})")
        return data

    def _check(self) -> None:
        if self._failure is not None:
            raise ProcessError(f"{self._failure}; {self._me} ends too")
        if self._left.is_set():
            raise ProcessError(f"{self._me} has left the others")

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tells the others of any error inside: a call that was cut short cannot be taken up again."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def _note(self, failure: str) -> bool:
        """Whether it is the first failure."""
        with self._state:
            first = self._failure is None and not self._left.is_set()
            if first:
                self._failure = failure
        return first

    def _lost(self, text: str) -> None:
        """A failure that comes from elsewhere: says so at once, wakes the main thread, and gives it GRACE_S."""
        if not self._note(text):
            return
        logger.error("%s; %s ends too", text, self._me)
        self._is_lost.set()
        if not self.process_id:
            self._tell(_FAILED, text.encode())
        for inbox in self._inbox.values():
            inbox.put((_FAILED, b""))
        timer = threading.Timer(GRACE_S, self._end, (ProcessError.exit_code,))
        timer.daemon = True
        timer.start()

    def _read(self, peer: int) -> None:
        """Takes in what a process says, until it has left or failed. Runs in a thread."""
        connection = self._peers[peer]
        try:
            while True:
                kind, size = _HEADER.unpack(_receive(connection, _HEADER.size))
                data = _receive(connection, size)
                if kind == _FAILED:
                    return self._lost(data.decode())
                if kind != _BEAT:
                    self._inbox[peer].put((kind, data))
                if kind == _LEFT:
                    return
        except TimeoutError:
            self._lost(f"{self.names[peer]} gave no sign of life for {SILENCE_S:g} s")
        except (OSError, EOFError):
            self._lost(f"{self.names[peer]} died: its connection is closed; its own log may say why")

    def _beat(self) -> None:
        """Gives signs of life, and looks whether this process gets on. Runs in a thread."""
        while not self._left.wait(BEAT_S):
            if self._failure is not None:
                return
            self._tell(_BEAT)
            # Later than the others' patience with this process: their messages name who is behind.
            if self.work is not None and time.monotonic() - self._since > self.timeout_s + 2 * GRACE_S:
                self._lost(f"{self.names[self.process_id]} has been at {self.work} for {self.timeout_s:g} s")

    def _tell(self, kind: int, data: bytes = b"") -> None:
        """Sends to all peers that still listen; who does not is noticed by its reader."""
        for peer in self._peers:
            try:
                self._send(peer, kind, data)
            except OSError:
                continue

    def _send(self, peer: int, kind: int, data: bytes) -> None:
        rest = memoryview(_HEADER.pack(kind, len(data)) + data)
        with self._sending[peer]:
            while rest:  # not sendall, whose timeout is for the whole
                rest = rest[self._peers[peer].send(rest[:_PIECE]) :]


def _reason(error: BaseException) -> str:
    """An error in one line, for the other processes."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _labelled(what: str, payload: bytes) -> bytes:
    return what.encode() + b"\0" + payload


def _label(data: bytes) -> str:
    return data.partition(b"\0")[0].decode(errors="replace")


def _receive(connection: socket.socket, size: int) -> bytes:
    """That many bytes. Raises EOFError when the other end is closed, TimeoutError when none come."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view[:_PIECE])
        if not count:
            raise EOFError
        view = view[count:]
    return bytes(data)


def _own_hosts() -> list[str]:
    """Names and addresses of this machine, the likeliest first."""
    name = socket.gethostname()
    try:
        addresses = socket.gethostbyname_ex(name)[2]
    except OSError:
        addresses = []
    return list(dict.fromkeys([*(a for a in addresses if not a.startswith("127.")), socket.getfqdn(), name]))


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _listen(*, local: bool) -> socket.socket:
    if local:
        server = socket.create_server(("127.0.0.1", 0))
    elif socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", 0))
    server.settimeout(BEAT_S)
    return server


def _accept(server: socket.socket, token: bytes, names: Sequence[str]) -> dict[int, socket.socket]:
    """In process 0: the connections of all others, by process. Strangers, without the token, are sent away."""
    deadline = time.monotonic() + MEETING_S
    peers: dict[int, socket.socket] = {}
    while len(peers) < len(names) - 1:
        if time.monotonic() > deadline:
            missing = ", ".join(name for index, name in enumerate(names) if index and index not in peers)
            raise ProcessError(
                f"{missing}: no connection to {names[0]} in {MEETING_S:g} s; is a firewall between them?"
            )
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        connection.settimeout(SILENCE_S)
        try:
            greeting = _receive(connection, len(token) + 4)
        except (OSError, EOFError):
            connection.close()
            continue
        peer = int.from_bytes(greeting[len(token) :], "big")
        if not hmac.compare_digest(greeting[: len(token)], token) or not 0 < peer < len(names):
            connection.close()
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token[::-1])
        peers[peer] = connection
    return dict(sorted(peers.items()))


def _connect(hosts: Sequence[str], port: int, token: bytes, process_id: int, name: str) -> socket.socket:
    """A connection to process 0 by the first of its names that leads there."""
    errors = []
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), timeout=BEAT_S * 5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token + process_id.to_bytes(4, "big"))
            if _receive(connection, len(token)) == token[::-1]:
                return connection
            errors.append(f"{host}:{port} is another program")
        except (OSError, EOFError) as error:
            errors.append(f"{host}:{port} {error}")
    raise ProcessError(f"{name} cannot be reached: {'; '.join(errors)}; set distributed.coordinator to its address")


def end_process(code: int) -> None:
    """Ends this process without waiting for anything: its main thread, or jax at the end of the interpreter, may wait
    for ever for a device or a process that is gone."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)
