"""Programs of other libraries beside the kernels: what their rows say, and that nothing else needs their packages."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import benchmark, peers
from kernels_pallas.benchmark import Workload
from kernels_pallas.hyper_connections import bench as site_bench
from kernels_pallas.hyper_connections import reference as site_reference
from kernels_pallas.index_topk import bench as index_bench
from kernels_pallas.index_topk import reference as index_reference
from kernels_pallas.peers import Peer
from kernels_pallas.sparse_attention import bench as attention_bench

ROOT = Path(__file__).parents[2]
BENCHES: list[Any] = [site_bench, index_bench, attention_bench]


def peer(seconds: Callable[[Any], float], package: str = "numpy") -> Peer:
    return Peer("a product", package, "the norm", seconds)


def refuses(package: ModuleType) -> float:
    warnings.warn("use\n 256", stacklevel=1)
    raise ValueError("head_dim\n 512 is too large")


def test_rows_of_peers() -> None:
    row = peers.measured(peer(lambda package: 2e-6 if package is np else 0.0))
    assert row == {"name": "a product", "version": np.__version__, "omits": "the norm", "us": 2.0}
    row = peers.measured(peer(refuses))
    assert "us" not in row and row["version"] == np.__version__
    assert row["why"] == "ValueError: head_dim 512 is too large use 256"
    row = peers.measured(peer(refuses, "no_such_package"))
    assert row["why"] == "no_such_package is not installed" and row["version"] is None


@pytest.mark.parametrize("bench", BENCHES)
def test_without_torch_it_says_so(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for work in bench.WORKLOADS:
        rows = [peers.measured(each) for each in bench.peers(work)]
        assert rows and all(row["why"] == "torch is not installed" and row["omits"] for row in rows)
        assert len({row["name"] for row in rows}) == len(rows)


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


def test_attention_in_torch() -> None:
    torch = pytest.importorskip("torch")
    query, kv = torch.randn(3, 1, 8, 64), torch.randn(3, 1, 20, 64)
    wanted = torch.softmax(query @ kv.transpose(-1, -2) * 0.125, -1) @ kv
    torch.testing.assert_close(peers.torch_attention(torch, query, kv, 0.125, "MATH"), wanted)


def _torch_of(torch: Any, array: Any) -> Any:
    found = torch.tensor(np.asarray(array, np.float32))
    return found.to(torch.bfloat16) if array.dtype == jnp.bfloat16 else found
