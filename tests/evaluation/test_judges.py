"""di_jax/evaluation/judges.py: rules, and the endpoint judge against a server in this process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from judge_endpoint import Endpoint, serving

from di_jax.evaluation.judges import RULES, EndpointJudge, UndecidedError, final_text, judge_by_rule, last_number
from di_jax.evaluation.tasks import EvalItem, EvaluationError


def item(answer: str, judge: str = "exact") -> EvalItem:
    return EvalItem("i", "t", answer, prompt="What?", meta={"judge": judge})


@pytest.mark.parametrize(
    ("judge", "answer", "text", "correct"),
    [
        ("exact", " a b", "a b\n", True),
        ("exact", "a b", "a  b", False),
        ("exact", "r</think>a", "other reasons</think>a", True),
        ("exact", "a", "a</think>b", False),
        ("exact", "", "<think>never ends", True),
        ("exact", "a", "<think>a", False),
        ("exact_answer", "Paris", "So.\nAnswer: paris.", True),
        ("exact_answer", "Paris", "Answer: Rome\nAnswer: **Paris**", True),
        ("exact_answer", "Paris", "Answer: Rome", False),
        ("number", " ~273 = 372", "~273 = 372", True),
        ("number", "372", " ~273 = 373", False),
        ("number", "372", "It is 372.0", True),
        ("number", "1000", "about 1,000", True),
        ("number", "4", "7-3 is 4", True),
        ("number", "-3", "It is 7-3", False),
        ("number", "-4", "= -4", True),
        ("number", "33", "\\boxed{33} of 100", True),
        ("number", "100", "\\boxed{33} of 100", False),
        ("number", "3", "three", False),
        ("choice", "B", "B", True),
        ("choice", "B", "(B).", True),
        ("choice", "B", "B) right", False),
        ("choice", "B", "Thus Answer: B", True),
        ("choice", "B", "Answer: A. No, wait. The answer is (B)", True),
        ("choice", "B", "Answer: **B**", True),
        ("choice", "B", "\\boxed{\\text{B}}", True),
        ("choice", "B", "Answer: Because", False),
        ("choice", "B", "Answer: C", False),
        ("choice", "B", "", False),
        ("json", '{"a": 1, "b": "x"}', ' {"b": "x", "a": 1}', True),
        ("json", '{"a": 1}', '{"a": "1"}', False),
        ("json", '{"a": 1}', '{"a": true}', False),
        ("json", '{"a": 1}', '{"a": 1, "b": 2}', False),
        ("json", '{"a": 1}', '{"a": 1', False),
        ("json", "[1, 2]", "[2, 1]", False),
        ("json", "true", "true", True),
        ("json", "true", "True", False),
        ("json", "1", "NaN", False),
        ("json", "1", "[" * 20_000 + "]" * 20_000, False),
        ("json", "1", "7" * 5000, False),
    ],
)
def test_rules(judge: str, answer: str, text: str, correct: bool) -> None:
    assert judge_by_rule(item(answer, judge), text).correct is correct


def test_verdicts_show_what_was_compared() -> None:
    assert judge_by_rule(item("7", "number"), "no, 8").found == "8"
    assert judge_by_rule(item("7", "number"), "none").found is None
    assert judge_by_rule(item("B", "choice"), "Answer: C").found == "C"
    assert judge_by_rule(item('{"a": 1}', "json"), "{").found is None


@pytest.mark.parametrize(
    ("judge", "answer"),
    [("number", "none"), ("choice", "BC"), ("json", "{"), ("vibes", "a"), ("json", "[" * 20_000), ("json", "NaN")],
)
def test_a_rule_that_does_not_fit_the_item_is_an_error(judge: str, answer: str) -> None:
    with pytest.raises(EvaluationError, match="item i: "):
        judge_by_rule(item(answer, judge), "{}")
    assert "vibes" not in RULES


def test_numbers() -> None:
    assert last_number("1e999999999999") is None  # more than a Decimal of this precision holds
    assert last_number("a1b") == 1
    assert final_text("<think>x</think> y ") == "y"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as made:
        yield made


def test_the_endpoint_is_asked_and_understood(endpoint: Endpoint, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret-key\n", encoding="utf-8")
    judge = EndpointJudge(endpoint.url + "/", "judge-model", key)
    endpoint.says("It matches.\ncorrect: yes", "<think>correct: yes?</think>**Correct: No**")
    assert judge(item("42"), "<think>hidden</think>forty-two").correct is True
    assert judge(item("42"), "41").correct is False
    first = endpoint.requests[0]
    assert first["path"] == "/v1/chat/completions" and first["key"] == "Bearer secret-key"
    assert first["body"]["model"] == "judge-model" and first["body"]["temperature"] == 0
    prompt = first["body"]["messages"][0]["content"]
    assert "What?" in prompt and "forty-two" in prompt and "42" in prompt and "hidden" not in prompt


def test_no_key_file_sends_no_key(endpoint: Endpoint) -> None:
    endpoint.says("correct: yes")
    EndpointJudge(endpoint.url, "m")(item("a"), "a")
    assert endpoint.requests[0]["key"] is None


def test_busy_endpoints_are_asked_again(endpoint: Endpoint) -> None:
    endpoint.answers += [(429, b"slow down"), (503, b"")]
    endpoint.says("correct: yes")
    assert EndpointJudge(endpoint.url, "m", pause=0.0)(item("a"), "a").correct
    assert len(endpoint.requests) == 3
    endpoint.answers += [(500, b"broken")] * 2
    with pytest.raises(EvaluationError, match=r"judge answered 500 \(broken\)"):
        EndpointJudge(endpoint.url, "m", tries=2, pause=0.0)(item("a"), "a")


def test_refusals_are_not_repeated_and_show_no_key(endpoint: Endpoint, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret-key", encoding="utf-8")
    endpoint.answers.append((401, b"bad key"))
    with pytest.raises(EvaluationError, match=r"judge answered 401 \(bad key\)") as caught:
        EndpointJudge(endpoint.url, "m", key, pause=0.0)(item("a"), "a")
    assert len(endpoint.requests) == 1 and "secret" not in str(caught.value)


@pytest.mark.parametrize("body", [b"not json", b"{}", b'{"choices": []}', b"[]", b"[" * 100_000])
def test_answers_that_are_no_completion(endpoint: Endpoint, body: bytes) -> None:
    endpoint.answers.append((200, body))
    with pytest.raises(EvaluationError, match="no chat completion"):
        EndpointJudge(endpoint.url, "m")(item("a"), "a")


def test_an_undecided_judge_is_an_error(endpoint: Endpoint) -> None:
    endpoint.says("Hard to say.")
    with pytest.raises(UndecidedError, match=r"neither 'correct: yes' nor 'correct: no' about item i"):
        EndpointJudge(endpoint.url, "m")(item("a"), "a")


def test_unreachable_and_misspelt_endpoints(tmp_path: Path) -> None:
    closed = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = closed.server_port
    closed.server_close()
    with pytest.raises(EvaluationError, match="cannot be reached in 2 tries"):
        EndpointJudge(f"http://127.0.0.1:{port}", "m", tries=2, pause=0.0)(item("a"), "a")
    with pytest.raises(EvaluationError, match="starts with http"):
        EndpointJudge("file:///etc", "m")(item("a"), "a")
    with pytest.raises(EvaluationError, match="at least one is needed"):
        EndpointJudge("http://127.0.0.1", "m", tries=0)(item("a"), "a")


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///v1",
        "http://:80/v1",
        "http://[::1",
        "http://::1/v1",
        "http://[::1]x/v1",
        "http://[::g]/v1",
        "http://[127.0.0.1]/v1",
        "http://a b/v1",
        "http://a%20b/v1",
        "http://h/v 1",
        "http://h/v1\n",
        "http://h\t/v1",
        "http://h/schön",
        "http://schön.de/v1",
        "http://a..b/v1",
        f"http://{'a' * 64}/v1",
        "http://h:port/v1",
        "http://h:0/v1",
        "http://h:65536/v1",
        "http://h/v1?version=1",
        "http://h/v1#chat",
    ],
)
def test_urls_that_no_request_can_go_to(url: str) -> None:
    with pytest.raises(EvaluationError, match="a judge's base_url is http") as caught:
        EndpointJudge(url, "m").check()
    assert str(caught.value).startswith(f"{url}: ") and "such as http://localhost:8000/v1" in str(caught.value)


def test_a_password_in_the_url_is_refused_and_not_shown() -> None:
    for url in ("http://me:secret@h/v1", "https://secret@[::1", "http://secret@"):
        with pytest.raises(EvaluationError, match="no user and no password; a key goes into its key file") as caught:
            EndpointJudge(url, "m").check()
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://h",
        "https://api.some-host.example/v1/",
        "http://localhost:8000/v1",
        "http://my_judge.:65535/a@b/~c/%20/(d)",
        "http://[::1]:8000/v1",
        "http://[fe80::1%eth0]/v1",
        "http://127.0.0.1:1",
    ],
)
def test_urls_of_servers(url: str) -> None:
    EndpointJudge(url, "m").check()


def test_a_slow_endpoint_times_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EvaluationError, match=r"cannot be reached in 1 tries \(.*timed out"):
            EndpointJudge(url, "m", timeout=0.05, tries=1)(item("a"), "a")


@pytest.mark.parametrize("content", ["", "\nkey", "schlüssel"])
def test_key_files_that_hold_no_key(tmp_path: Path, content: str) -> None:
    key = tmp_path / "key"
    key.write_text(content, encoding="utf-8")
    with pytest.raises(EvaluationError, match="first line must be the judge's key"):
        EndpointJudge("http://127.0.0.1", "m", key)(item("a"), "a")
    with pytest.raises(EvaluationError, match=r"gone: the judge's key cannot be read \(FileNotFoundError\)"):
        EndpointJudge("http://127.0.0.1", "m", tmp_path / "gone")(item("a"), "a")
