"""Which implementation runs: a named one or an error, "auto" says once what it took."""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax.numpy as jnp
import pytest

from di_jax.errors import UserError
from kernels_pallas import choice
from kernels_pallas.choice import OPERATIONS, KernelChoice, UnknownImplementation, choose
from kernels_pallas.hyper_connections import api

AVAILABLE: dict[str, Callable[..., object]] = {"fast": lambda: 1, "reference": lambda: 2}


def test_auto_takes_the_first_and_logs_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_logged", set())
    caplog.set_level(logging.INFO, logger=choice.logger.name)
    for _ in range(3):
        assert choose("index_topk", "auto", AVAILABLE)() == 1
    assert [r.getMessage() for r in caplog.records] == ["kernel index_topk: auto chose fast"]
    choose("expert_ffn", "auto", AVAILABLE)
    assert len(caplog.records) == 2, "once for every operation"
    choose("sparse_attention", "auto", {"reference": lambda: 2}, "the query must be bfloat16, it is float32")
    assert caplog.messages[-1].endswith("auto chose reference, as the query must be bfloat16, it is float32")


def test_a_named_implementation_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=choice.logger.name)
    assert choose("index_topk", "reference", AVAILABLE)() == 2
    assert not caplog.records


def test_an_unknown_name_never_falls_back() -> None:
    with pytest.raises(UnknownImplementation, match=r"'index_topk' has no implementation 'cuda'.*fast, reference"):
        choose("index_topk", "cuda", AVAILABLE)
    assert issubclass(UnknownImplementation, UserError)


def test_an_operation_raises_for_an_unknown_name() -> None:
    with pytest.raises(UnknownImplementation, match="hyper_connections"):
        api.collapse(jnp.ones((1, 4, 8)), jnp.ones((1, 4)), implementation="nonsense")


def test_overrides_by_operation() -> None:
    kernels = KernelChoice("reference", (("expert_ffn", "dense"),))
    assert {op: kernels.of(op) for op in OPERATIONS} == dict.fromkeys(OPERATIONS, "reference") | {"expert_ffn": "dense"}
    assert KernelChoice().of("expert_ffn") == "auto"
