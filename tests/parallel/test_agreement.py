"""What processes tell one another: here each is a thread with a connection of its own."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from di_jax.errors import UserError
from di_jax.parallel import agreement
from di_jax.parallel.agreement import Agreement, ProcessError, ProcessGroup

PATIENCE_S = 60  # of the tests with themselves: a hang is a failure


class Run:
    """Groups of as many processes, and the exit codes of those that were made to end."""

    def __init__(self, count: int, timeout_s: float, meddle: Callable[[int], None] = lambda port: None) -> None:
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        cards: list[bytes] = [b""] * count
        here = threading.Barrier(count)

        def join(index: int) -> ProcessGroup:
            def share(card: bytes) -> Sequence[bytes]:
                cards[index] = card
                here.wait(PATIENCE_S)
                if index == 0:
                    meddle(int(card.partition(b'"port": ')[2].partition(b",")[0]))
                return cards

            return ProcessGroup.meet(index, count, share, hosts=["127.0.0.1"], timeout_s=timeout_s, end=self.ended.put)

        self.groups = self.each(join, range(count))

    @staticmethod
    def each(call: Callable[[Any], Any], what: Sequence[Any]) -> list[Any]:
        """The results of the calls, made at once; an exception is a result."""

        def caught(one: Any) -> Any:
            try:
                return call(one)
            except BaseException as error:
                return error

        with ThreadPoolExecutor(len(what)) as pool:
            return list(pool.map(caught, what, timeout=PATIENCE_S))

    def all(self, call: Callable[[ProcessGroup], Any]) -> list[Any]:
        return self.each(call, self.groups)


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def start(count: int, timeout_s: float = PATIENCE_S, **options: Any) -> Run:
        made.append(Run(count, timeout_s, **options))
        return made[-1]

    yield start
    for one in made:
        for group in one.groups:
            if isinstance(group, ProcessGroup):
                group._left.set()
                for connection in group._peers.values():
                    connection.close()


def numbers(group: Agreement) -> np.ndarray:
    return np.arange(3, dtype=np.int32) + 10 * group.process_id


def check_messages(results: list[Any], *patterns: str) -> None:
    for result in results:
        assert isinstance(result, ProcessError) and isinstance(result, UserError) and result.exit_code == 1, result
        assert all(pattern in str(result) for pattern in patterns), str(result)


def test_one_process_agrees_with_itself() -> None:
    alone = Agreement()
    assert (alone.process_id, alone.num_processes, alone.is_first, alone.lost) == (0, 1, True, None)
    assert alone.gather(numbers(alone), "x").tolist() == [[0, 1, 2]]
    assert alone.sum(numbers(alone)).tolist() == [0, 1, 2]
    assert alone.exchange(b"a", "x") == alone.collect(b"a", "x") == [b"a"]
    alone.working("a step")
    alone.fail(RuntimeError("x"))
    alone.leave()


@pytest.mark.parametrize("count", [2, 4])
def test_every_process_gets_the_same_in_the_order_of_processes(run: Callable[..., Run], count: int) -> None:
    everyone = run(count)
    for _ in range(3):
        for got in everyone.all(lambda group: group.gather(numbers(group), "x")):
            assert got.dtype == np.int32 and got.tolist() == [[10 * p, 10 * p + 1, 10 * p + 2] for p in range(count)]
    wide = np.full((2, 3), 2**40, np.int64)
    for got in everyone.all(lambda group: group.sum(wide + group.process_id)):
        assert got.dtype == np.int64 and (got == count * wide + sum(range(count))).all() and got.shape == (2, 3)
    # Nothing, and more than a connection takes at once.
    for size in (0, 1, 3_000_001):
        payloads = [bytes([65 + p]) * (size * p) for p in range(count)]
        for got in everyone.all(lambda group, told=payloads: group.exchange(told[group.process_id], "y")):
            assert got == payloads
        assert everyone.all(lambda group, told=payloads: group.collect(told[group.process_id], "z")) == [
            payloads,
            *[[]] * (count - 1),
        ]
    assert [group.is_first for group in everyone.groups] == [True] + [False] * (count - 1)


def test_a_process_that_does_something_else_is_named(run: Callable[..., Run]) -> None:
    everyone = run(3)
    got = everyone.all(lambda group: group.gather(numbers(group), "a step" if group.process_id != 1 else "outputs"))
    check_messages(got, "process 1 (pid", "is at 'outputs'", "process 0 at 'a step'")
    check_messages(everyone.all(lambda group: group.gather(numbers(group), "a step")), "process 1 (pid")


def test_who_does_not_answer_in_time_is_named(run: Callable[..., Run]) -> None:
    everyone = run(4, timeout_s=0.3)
    absent = {1, 3}
    got = everyone.all(lambda group: None if group.process_id in absent else group.gather(numbers(group), "a step"))
    told = [got[0], got[2]]
    check_messages(told, "no answer for 0.3 s (a step)", "process 1 (pid", "process 3 (pid")
    assert not any("process 2 (pid" in str(one).partition("from")[2] for one in told)


def test_a_death_ends_everyone_and_is_named(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that wait are told; one that is inside a call of the device, and hears nothing, is ended."""
    monkeypatch.setattr(agreement, "GRACE_S", 0.1)
    everyone = run(4)

    def act(group: ProcessGroup) -> Any:
        if group.process_id == 1:
            return group._peers[0].shutdown(socket.SHUT_RDWR)
        return None if group.process_id == 3 else group.gather(numbers(group), "a step")

    got = everyone.all(act)
    check_messages([got[0], got[2]], "process 1 (pid", "died")
    assert {everyone.ended.get(timeout=PATIENCE_S) for _ in range(3)} == {1}
    assert "process 1 (pid" in (everyone.groups[3].lost or "") and everyone.groups[3].lost == everyone.groups[0].lost
    assert "process 3 ends too" in caplog.text
    check_messages(everyone.each(lambda group: group.leave(), [everyone.groups[3]]), "process 1 (pid")


def test_silence_is_noticed(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1 is frozen: it is connected, and gives no sign of life."""
    monkeypatch.setattr(ProcessGroup, "_beat", lambda group: None if group.process_id == 1 else beat(group))
    monkeypatch.setattr(agreement, "SILENCE_S", 0.5)
    monkeypatch.setattr(agreement, "BEAT_S", 0.05)
    everyone = run(3)
    got = everyone.all(lambda group: None if group.process_id == 1 else group.gather(numbers(group), "a step"))
    check_messages([got[0], got[2]], "process 1 (pid", "no sign of life for 0.5 s")


beat = ProcessGroup._beat


def test_signs_of_life_keep_a_slow_run_going(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "SILENCE_S", 0.5)
    monkeypatch.setattr(agreement, "BEAT_S", 0.05)
    everyone = run(3)

    def slow(group: ProcessGroup) -> Any:
        if group.process_id == 1:
            threading.Event().wait(1.5)
        return group.gather(numbers(group), "a step").shape

    assert everyone.all(slow) == [(3, 3)] * 3


def test_a_process_says_why_it_ends(run: Callable[..., Run]) -> None:
    everyone = run(3)

    def act(group: ProcessGroup) -> Any:
        return group.fail(KeyboardInterrupt()) if group.process_id == 1 else group.gather(numbers(group), "a step")

    got = everyone.all(act)
    check_messages([got[0], got[2]], "process 1 (pid", "failed: KeyboardInterrupt")
    assert everyone.groups[1].lost is None, "it failed by itself"


def test_an_error_of_the_device_is_put_down_to_the_death_behind_it(run: Callable[..., Run]) -> None:
    """A collective breaks in all that are left, often before the connection is seen to be closed."""
    everyone = run(3)

    def act(group: ProcessGroup) -> None:
        if group.process_id == 1:
            group._peers[0].shutdown(socket.SHUT_RDWR)
        else:
            group.fail(RuntimeError("all-reduce failed: connection closed by peer"))

    everyone.all(act)
    assert all("process 1 (pid" in (everyone.groups[p].lost or "") for p in (0, 2))


def test_an_interrupted_call_ends_the_run(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = run(2)

    def act(group: ProcessGroup) -> Any:
        if group.process_id == 1:
            monkeypatch.setattr(group, "_take", interrupted)
        return group.gather(numbers(group), "a step")

    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    assert isinstance(everyone.all(act)[1], KeyboardInterrupt)
    check_messages(everyone.all(lambda group: group.gather(numbers(group), "a step"))[:1], "KeyboardInterrupt")


def test_all_leave_together(run: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    everyone = run(3)
    everyone.groups[2].working("a step")
    with caplog.at_level(logging.INFO):
        assert everyone.all(lambda group: group.leave()) == [None] * 3
        assert everyone.all(lambda group: group.leave()) == [None] * 3
    assert not caplog.records and everyone.ended.empty()
    check_messages(everyone.all(lambda group: group.gather(numbers(group), "x")), "has left the others")


@pytest.mark.parametrize("early", [0, 1])
def test_who_leaves_early_is_named(run: Callable[..., Run], early: int) -> None:
    everyone = run(3)
    got = everyone.all(
        lambda group: group.leave() if group.process_id == early else group.gather(numbers(group), "a step")
    )
    check_messages(got, "has finished")
    assert all(f"process {early}" in str(one) for one in got)


def test_a_step_that_does_not_end_is_noticed(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "GRACE_S", 0.05)
    monkeypatch.setattr(agreement, "BEAT_S", 0.05)
    everyone = run(2, timeout_s=0.3)
    everyone.groups[0].working(None)
    everyone.groups[1].working("step 3, decode")
    assert everyone.ended.get(timeout=PATIENCE_S) == 1
    assert "process 1 (pid" in (everyone.groups[1].lost or "") and "step 3, decode" in (everyone.groups[1].lost or "")


def test_strangers_are_sent_away(run: Callable[..., Run]) -> None:
    def meddle(port: int) -> None:
        for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n" * 3, bytes(20)):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(greeting)

    everyone = run(3, meddle=meddle)
    assert everyone.all(lambda group: group.gather(numbers(group), "x").shape) == [(3, 3)] * 3


def test_a_process_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    cards = [b'{"host": "h", "pid": 1, "hosts": ["127.0.0.1"], "port": %d, "token": "00"}' % port] * 2
    with pytest.raises(ProcessError, match=r"process 0 \(pid 1 on h\) cannot be reached: 127\.0\.0\.1:.*coordinator"):
        ProcessGroup.meet(1, 2, lambda _: cards)
