"""Programs of other libraries beside the kernels: what their rows say, and that nothing else needs their packages."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import benchmark, peers
from kernels_pallas.benchmark import Workload
from kernels_pallas.compress_store import bench as store_bench
from kernels_pallas.hyper_connections import bench as site_bench
from kernels_pallas.hyper_connections import reference as site_reference
from kernels_pallas.index_topk import bench as index_bench
from kernels_pallas.index_topk import reference as index_reference
from kernels_pallas.peers import Measured, Peer
from kernels_pallas.sparse_attention import bench as attention_bench

ROOT = Path(__file__).parents[2]
BENCHES: list[Any] = [site_bench, index_bench, attention_bench, store_bench]


def peer(seconds: Callable[[Any], float], package: str = "numpy", error: float = 0.125) -> Peer:
    return Peer("a product", package, "the norm", lambda package: Measured(seconds(package), error), bound=0.25)


def refuses(package: ModuleType) -> float:
    warnings.warn("use\n 256", stacklevel=1)
    raise ValueError("head_dim\n 512 is too large")


def test_rows_of_peers() -> None:
    row = peers.measured(peer(lambda package: 2e-6 if package is np else 0.0))
    assert row == {"name": "a product", "version": np.__version__, "omits": "the norm", "error": 0.125, "us": 2.0}
    row = peers.measured(peer(lambda _: 2e-6), flops=4_000_000)
    assert row["us"] == 2.0 and row["tflop_per_s"] == pytest.approx(2.0)
    row = peers.measured(peer(refuses))
    assert "us" not in row and row["version"] == np.__version__
    assert row["why"] == "ValueError: head_dim 512 is too large use 256"
    row = peers.measured(peer(refuses, "no_such_package"))
    assert row["why"] == "no_such_package is not installed" and row["version"] is None


@pytest.mark.parametrize("error", [0.26, float("nan")])
def test_what_computes_something_else_is_no_peer(error: float) -> None:
    row = peers.measured(peer(lambda _: 2e-6, error=error), flops=1)
    assert "us" not in row and "tflop_per_s" not in row and "something else" in row["why"]
    json.dumps(row, allow_nan=False)


def test_difference() -> None:
    wanted = [np.full((2, 3), 2, np.float32), jnp.full(4, -10, jnp.bfloat16)]
    assert peers.difference([np.full((2, 3), 2.0), np.full(4, -10.0)], wanted) == 0
    assert peers.difference([np.full((2, 3), 3.0), np.full(4, -9.0)], wanted) == pytest.approx(0.5)
    assert np.isnan(peers.difference([np.full((2, 3), np.nan), np.full(4, 90.0)], wanted))
    with pytest.raises(ValueError, match="shape"):
        peers.difference([np.full((3, 2), 2.0), np.full(4, -10.0)], wanted)


@pytest.mark.parametrize("bench", BENCHES)
def test_without_torch_it_says_so(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for work in bench.WORKLOADS:
        found = bench.peers(work)
        rows = [peers.measured(each) for each in found if each.package == "torch"]  # others may run here
        assert rows and all(row["omits"] and "us" not in row for row in rows)
        assert {row["why"] for row in rows} == {"torch is not installed"}
        assert len({each.name for each in found}) == len(found)


class Work:
    name, bytes, flops = "eight rows", 10, 20


@pytest.mark.parametrize("asked", [True, False])
def test_the_command_measures_peers_when_asked(asked: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(work: Workload) -> dict[str, Any]:
        return benchmark.measured(work, {benchmark.KERNEL: lambda: 1e-6, "reference": lambda: 3e-6})

    both = [peer(lambda _: 2e-6), peer(refuses)]
    options = ["--peers"] if asked else []
    benchmark.main("", [Work], measure, lambda work: both if work is Work else [], [*options, "--json"])
    row = json.loads(capsys.readouterr().out)
    assert row["reference"]["us"] == pytest.approx(3) and ("peers" in row) == asked
    benchmark.main("", [Work], measure, lambda work: both, options)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  peer")]
    if asked:
        assert [each.get("us") for each in row["peers"]] == [2.0, None]
        assert "2.0 us" in lines[0] and "omits the norm" in lines[0] and "too large" in lines[1]
    assert len(lines) == (2 if asked else 0)


@pytest.mark.parametrize(
    ("bench", "fields"), [(site_bench, {"warpgroups": 2, "chunks": [32]}), (index_bench, {"units": 8})]
)
def test_other_tunings(bench: Any, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def measure_tuning(work: Workload, fields: dict[str, Any]) -> dict[str, Any]:
        asked.append(fields)
        return benchmark.measured(work, {benchmark.KERNEL: lambda: 1e-6})

    def refused(work: Workload) -> dict[str, Any]:
        raise AssertionError("the tuned choice is not asked for")

    options = ["--tuning", json.dumps(fields), "--tuning", "{}"]
    benchmark.main("", [Work], refused, arguments=[*options, "--json"], measure_tuning=measure_tuning)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert asked == [fields, {}] == [row["tuning"] for row in rows] and "reference" not in rows[0]
    benchmark.main("", [Work], refused, arguments=options, measure_tuning=measure_tuning)
    assert f"by {fields}" in capsys.readouterr().out
    with pytest.raises((TypeError, ValueError)):
        bench.measure_tuning(bench.WORKLOADS[0], {"no_such_field": 1})


def test_a_tuning_that_does_not_divide_the_channels() -> None:
    row = site_bench.measure_tuning(site_bench.Workload(8), {"chunks": [64, 64, 64]})
    assert "192 channels" in row[benchmark.KERNEL]
    if jax.default_backend() == "cpu":
        row = site_bench.measure_tuning(site_bench.Workload(8), {"chunks": [64]})
        assert "needs a GPU" in row[benchmark.KERNEL]


@pytest.mark.parametrize(
    ("rows", "entries", "decode"),
    [
        (3, 32, True),
        pytest.param(3, 0, True, marks=pytest.mark.slow),
        pytest.param(256, 32, False, marks=pytest.mark.slow),
    ],
)
def test_keys_of_attention_are_those_of_the_reference(
    rows: int, entries: int, decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Window rows of the ring and of the step, and entries by page, in one array, and which a row attends to."""
    monkeypatch.setattr(attention_bench, "BLOCKS", 40)
    monkeypatch.setattr(attention_bench, "CONTEXT", 1024)
    work = attention_bench.Workload("a few rows", rows, entries=entries, decode=decode)
    keys, places = attention_bench.keys_of(work)
    query = np.asarray(attention_bench.inputs(work)[2]["query"], np.float64)
    kv = np.asarray(keys, np.float64)[np.asarray(places)]
    assert kv.shape == (rows, 128 + entries, 512)
    weights = np.exp(np.einsum("thd,tkd->thk", query, kv) * 512**-0.5)
    found = np.einsum("thk,tkd->thd", weights / weights.sum(-1, keepdims=True), kv)
    bare, whole = (attention_bench.wanted(work, whole) for whole in (False, True))
    assert peers.difference([found], [bare]) < attention_bench.PEER_BOUND < peers.difference([found], [whole])
    assert peers.difference([np.roll(found, 1, axis=0)], [bare]) > 0.2


def test_the_kernel_of_jax_attends_like_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_bench, "BLOCKS", 40)
    monkeypatch.setattr(attention_bench, "CONTEXT", 1024)
    work = attention_bench.Workload("two rows", 2, entries=32)
    wanted = attention_bench.wanted(work, False)

    def row(bound: float) -> dict[str, Any]:
        return peers.measured(
            benchmark.jax_peer(
                "mqa", "sinks", partial(attention_bench.triton_attention, block_h=16, interpret=True),
                partial(attention_bench.jax_arrays, work), lambda found: peers.difference(found, [wanted]), bound, 2,
            )
        )  # fmt: skip

    if jax.default_backend() == "cpu":
        assert row(1.0)["why"] == "RuntimeError: it needs a GPU"
    monkeypatch.setattr(benchmark.jax, "default_backend", lambda: "gpu")
    assert row(attention_bench.PEER_BOUND)["us"] > 0
    assert "something else" in row(1e-4)["why"]


@pytest.mark.parametrize(
    ("rows", "sequences", "context", "inside"),
    [
        (4, 4, 2048, False),
        pytest.param(256, 1, 2048, False, marks=pytest.mark.slow),
        pytest.param(2, 2, 32_768, True, marks=pytest.mark.slow),
    ],
)
def test_keys_of_the_index_are_those_of_the_reference(rows: int, sequences: int, context: int, inside: bool) -> None:
    work = index_bench.Workload("a few rows", rows, sequences, context, inside=inside)
    layout, places, (weights, query, pool, *candidates) = index_bench.inputs(work)
    chosen, _ = index_reference.index_topk(
        query, weights, pool, places, layout, source=index_bench.source_of(layout),
        candidates=candidates[0] if candidates else None, make_candidates=False,
    )  # fmt: skip
    exact = index_bench.wanted(work)
    assert exact.shape == (min(rows, index_bench.CHECKED), 512)
    if candidates:  # of an entry its number among the candidates
        entry = candidates[0][..., None] * 8 + jnp.arange(8)
        exact = np.take_along_axis(np.asarray(entry).reshape(rows, -1), exact, -1)
    last = slice(None) if rows == sequences else slice(-1, None)  # nothing is masked here: the last row sees all
    assert index_bench.missed(np.asarray(chosen)[last], exact[last]) == 0
    assert index_bench.missed(np.asarray(chosen)[last] + 1, exact[last]) > index_bench.PEER_BOUND


def test_nothing_imports_torch() -> None:
    files = [file for folder in ("di_jax", "kernels_pallas") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    imports = re.compile(r"^\s*(import|from) torch\b", re.MULTILINE)
    assert imports.search("def f():\n    import torch\n")
    assert [str(file) for file in files if imports.search(file.read_text(encoding="utf-8"))] == []


def test_a_site_in_torch_is_the_reference() -> None:
    torch = pytest.importorskip("torch")
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.random.normal(next(keys), shape, dtype)

    rows, hc, dim = 6, 4, 256
    arrays = [normal(rows, dim, dtype=jnp.bfloat16), normal(rows, hc, dim, dtype=jnp.bfloat16)]
    arrays += [abs(normal(rows, hc)), jax.nn.softmax(normal(rows, hc, hc)), abs(normal(rows, hc))]
    arrays += [normal(24, hc * dim) * 0.02, normal(24), 1 + 0.3 * normal(3), 1 + normal(dim, dtype=jnp.bfloat16)]
    constants = {"iterations": 20, "eps": 1e-6, "rms_eps": 1e-20}
    stacked = [a[None] for a in arrays[5:]]
    wanted = site_reference.fused_site(0, *arrays[:5], *stacked, **constants)
    given = tuple(_torch_of(torch, a) for a in arrays)
    for mine, exact in zip(peers.torch_site(torch, given, **constants), wanted, strict=True):
        np.testing.assert_allclose(mine.float().numpy(), np.asarray(exact, np.float32), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("sequences", [4, 1])
def test_entries_in_torch_are_those_of_the_reference(sequences: int) -> None:
    torch = pytest.importorskip("torch")
    keys = jax.random.split(jax.random.key(0), 3)
    query, key = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, ((4, 8, 32), (sequences, 300, 32))))
    weights = jax.random.normal(keys[2], (4, 8))
    wanted = index_reference.best_entries(index_reference.scores(query, weights, key if sequences > 1 else key[0]), 16)
    given = [_torch_of(torch, a) for a in (query, weights, key)]
    found = peers.torch_index(torch, *given, 16, peers.torch_weigh).sort(-1).values
    assert (found.numpy() == np.asarray(wanted)).mean() > 0.95  # products are rounded


@pytest.mark.parametrize("compile_it", [False, True])
def test_cache_writes_in_torch_are_those_of_the_reference(compile_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(store_bench, "BLOCKS", 64)
    for work in (
        store_bench.Workload("ratio 2", 8, 1),
        store_bench.Workload("ratio 1", 8, 3),
        store_bench.Workload("window", 8),
        store_bench.Workload("prefill", 256, 1, decode=False),
        store_bench.Workload("window of prefill", 256, decode=False),
    ):
        layout, exact = store_bench.inputs(work)[0], store_bench.wanted(work)
        caches = peers.numpy_of(torch, store_bench.torch_layer(torch, _device(torch), work, compile_it)())
        found = store_bench.decoded(work, layout, *caches)
        assert peers.difference(found, exact) < store_bench.PEER_BOUND
        others = [np.roll(x, 1, axis=0) for x in found]
        assert all(peers.difference([x], [y]) > store_bench.PEER_BOUND for x, y in zip(others, exact, strict=True))


def test_attention_with_sinks_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(attention_bench, "BLOCKS", 40)
    monkeypatch.setattr(attention_bench, "CONTEXT", 1024)
    work = attention_bench.Workload("five rows", 5, entries=32)
    wanted = attention_bench.wanted(work, True)
    for gather in (False, True):
        found = peers.numpy_of(torch, attention_bench.formula_call(torch, _device(torch), work, gather)())
        assert peers.difference(found, [wanted]) < attention_bench.PEER_BOUND


def test_attention_in_torch() -> None:
    torch = pytest.importorskip("torch")
    query, kv = torch.randn(3, 1, 8, 64), torch.randn(3, 1, 20, 64)
    wanted = torch.softmax(query @ kv.transpose(-1, -2) * 0.125, -1) @ kv
    torch.testing.assert_close(peers.torch_attention(torch, query, kv, 0.125, "MATH"), wanted)


def _torch_of(torch: Any, array: Any) -> Any:
    found = torch.tensor(np.asarray(array, np.float32))
    return found.to(torch.bfloat16) if array.dtype == jnp.bfloat16 else found


def _device(torch: Any) -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
