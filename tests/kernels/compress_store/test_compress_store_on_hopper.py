"""Cache writes of the real kernels on a Hopper GPU, in the released shapes, against float64 with true divisions and
against the reference: what is written, and that no other byte is."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import Array
from on_hopper import (
    CONFIG,
    NEEDS_HOPPER,
    QUANTIZED,
    assert_same_bits,
    host_rows,
    on_host,
    poison_outputs,
    released_layout,
)
from paged import Piece, page_of
from test_compress_store_sm90 import CANARY, agree, exactly, numbers, pool_pair

from di_jax.model.cache import CacheLayout
from di_jax.model.rope import inverse_frequencies, rotation
from di_jax.model.rows import Rows
from kernels_pallas.compress_store import api
from kernels_pallas.hopper import KERNEL

pytestmark = NEEDS_HOPPER

BF16 = jnp.dtype(jnp.bfloat16)
LAYERS, PROJECTED, FIRST = 4, 1, 2  # the kernel norms and rotates rows of one layer, and stores those of two others
POOLED, PLAIN = 1, CONFIG.kv_source_ratios.index(1)
SOURCES = len(CONFIG.kv_source_ratios)
PAGES, SHARED = 16, 8  # blocks of a table, and blocks that stand where a sequence writes nothing
RING, PAIRS = CONFIG.window_ring, CONFIG.compressor_ring
TILE = 16
# Share of bytes that differ. From float64: a bfloat16 next to a rounding boundary now and then. From the reference: it
# divides by way of a reciprocal, and the quotient of a bfloat16 by an e4m3 often lies just between two codes.
FLIPS, REFERENCE_FLIPS = 5e-3, 0.1


@partial(jax.jit, static_argnames=("layout", "implementation"), donate_argnames="caches")
def step(
    caches: dict[str, Array], a: dict[str, Array], rows: Rows, layout: CacheLayout, implementation: str
) -> tuple[dict[str, Array], dict[int, Array]]:
    """All stores of two sources and three layers: the caches after it, and the latents of each source."""
    options: dict[str, Any] = {"implementation": implementation}
    pool, keys, pairs, window = (caches[name] for name in ("pool", "keys", "pairs", "window"))
    latents = {}
    for source in (POOLED, PLAIN):
        gate = a["gate"] if source == POOLED else None
        pool, pairs, latents[source] = api.store_entries(
            pool, pairs, source, gate, a[f"latent{source}"], a["norm"], rows, layout, dtype=BF16, **options
        )
        keys = api.store_keys(keys, source, a[f"key{source}"], a["key_norm"], rows, layout, **options)
    cos_sin = rotation(layout.config, True, rows.position)
    window = api.store_projected(
        window, jnp.int32(PROJECTED), a["projected"], a["kv_norm"], cos_sin, rows, layout, **options
    )
    window = api.store_window(window, jnp.int32(FIRST), a["kv"], rows, layout, **options)
    return {"pool": pool, "keys": keys, "pairs": pairs, "window": window}, latents


@dataclasses.dataclass(frozen=True)
class Group:
    """What a completed group becomes. made: its row of the latents; place: its record, None where it is cached."""

    made: int
    place: tuple[int, int] | None
    position: int
    latent: np.ndarray


class Case:
    """Random rows of a step. Pools are canaries; pairs that are not read, and rows without a meaning, are NaN."""

    def __init__(self, pieces: list[Piece], tile: int, padding_tiles: int, num_blocks: int) -> None:
        generator = np.random.default_rng(len(pieces))
        blocks = iter(range(SHARED, num_blocks))
        for piece in pieces:
            written = {t // 128 for t in piece.positions}
            piece.blocks = [
                next(blocks) if page in written else int(generator.integers(SHARED)) for page in range(PAGES)
            ]
        self.pieces = pieces
        self.rows, first = host_rows(pieces, tile=tile, padding_tiles=padding_tiles)
        self.layout = released_layout(num_blocks=num_blocks, num_slots=len(pieces))
        self.valid = [(f + i, p, t) for p, f in zip(pieces, first, strict=True) for i, t in enumerate(p.positions)]
        total = self.rows.num_rows
        self.arrays: dict[str, np.ndarray] = {
            "gate": numbers(1, total, 512, dtype=np.float32),
            f"latent{POOLED}": numbers(2, total, 512, dtype=np.float32),
            f"latent{PLAIN}": numbers(3, total, 512),
            "projected": numbers(4, total, 512),
            "kv": numbers(5, 2, total, 512),
        }
        dead = ~np.isin(np.arange(total), [row for row, *_ in self.valid])
        for array in self.arrays.values():
            array[..., dead, :] = np.nan
        for name, rows, own, channels in (
            ("norm", SOURCES, (POOLED, PLAIN), 512),
            ("key_norm", SOURCES, (POOLED, PLAIN), 128),
            ("kv_norm", LAYERS, (PROJECTED,), 512),
        ):
            self.arrays[name] = numbers(6, rows, channels)
            self.arrays[name][~np.isin(np.arange(rows), own)] = np.nan

        slots, page = len(pieces), (num_blocks, self.layout.rows_per_block)
        pairs = np.full((len(CONFIG.pooled_sources), slots, PAIRS, 2, 512), np.nan, np.float32)
        self.ordinal = CONFIG.pooled_sources.index(POOLED)
        for piece in pieces:
            if piece.start % 2:
                pairs[self.ordinal, piece.slot, (piece.start - 1) % PAIRS] = generator.normal(size=(2, 512))
        self.caches: dict[str, np.ndarray] = {
            "pool": np.full((*page, 288), CANARY, np.uint8),
            "keys": np.full((*page, 68), CANARY, np.uint8),
            "pairs": pairs,
            "window": np.full((LAYERS, slots, RING, 528), CANARY, np.uint8),
        }
        self.groups = {source: self._groups(source) for source in (POOLED, PLAIN)}
        for source, groups in self.groups.items():
            made = total if source == PLAIN else self.rows.num_tiles * -(-tile // 2)
            key = np.full((made, 128), np.nan, ml_dtypes.bfloat16)
            key[[g.made for g in groups]] = numbers(7, len(groups), 128)
            self.arrays[f"key{source}"] = key

    def _groups(self, source: int) -> list[Group]:
        """Every group that ends in this step, token by token."""
        ratio, tile, groups = CONFIG.kv_source_ratios[source], self.rows.tile, []
        own = {(piece.slot, t): row for row, piece, t in self.valid}
        latent, gate = self.arrays[f"latent{source}"], self.arrays["gate"]
        for row, piece, t in self.valid:
            if t % ratio != ratio - 1:
                continue
            x = latent[row]
            if source == POOLED:
                before = own.get((piece.slot, t - 1))
                history = self.caches["pairs"][self.ordinal, piece.slot, (t - 1) % PAIRS]
                pair = history if before is None else (gate[before], latent[before])
                x = pool_pair(np.stack([pair[0], gate[row]]), np.stack([pair[1], latent[row]]))
            place = page_of(self.layout, source, piece.blocks, t // ratio) if t >= piece.cached else None
            made = row // tile * -(-tile // ratio) + row % tile // ratio
            groups.append(Group(made, place, t // ratio * ratio, norm(x, self.arrays["norm"][source])))
        return groups

    def windows(self, layer: int) -> tuple[list[int], tuple[np.ndarray, ...]]:
        """Rows that stay in the rings of a layer, and their places."""
        kept = {}
        for row, piece, t in self.valid:
            if t >= max(piece.window_start, piece.start + piece.count - RING):
                kept[row] = (layer, piece.slot, t % RING)
        return list(kept), tuple(np.array(list(kept.values()), int).reshape(-1, 3).T)

    def start(self) -> dict[str, Array]:
        return {name: jnp.array(a) for name, a in self.caches.items()}

    def run(self, implementation: str, rows: Rows | None = None) -> tuple[dict[str, np.ndarray], dict[int, np.ndarray]]:
        """Caches, and the latents that groups became."""
        arguments = (self.start(), {name: jnp.asarray(a) for name, a in self.arrays.items()}, rows or self.rows)
        options: dict[str, Any] = {"layout": self.layout, "implementation": implementation}
        poison_outputs(jax.eval_shape(partial(step, **options), *arguments)[1])
        caches, latents = jax.tree.map(np.asarray, step(*arguments, **options))
        for source, latent in latents.items():
            made = self.rows.num_tiles * -(-self.rows.tile // CONFIG.kv_source_ratios[source])
            assert latent.shape == (made, 512) and latent.dtype == ml_dtypes.bfloat16
        return caches, {source: latents[source][[g.made for g in groups]] for source, groups in self.groups.items()}


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    y = weight * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + CONFIG.rms_norm_eps)
    return y.astype(np.float32).astype(ml_dtypes.bfloat16)


def rotated(x: np.ndarray, positions: list[int]) -> np.ndarray:
    angle = np.array(positions, np.float32)[:, None] * inverse_frequencies(CONFIG, True)
    pairs = x[:, -64:].astype(np.float64).reshape(-1, 32, 2)
    value = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle.astype(np.float64))
    tail = np.stack([value.real, value.imag], axis=-1).reshape(-1, 64)
    return np.concatenate([x[:, :-64], tail.astype(np.float32).astype(ml_dtypes.bfloat16)], axis=1)


@cache
def decode(rows: int) -> Case:
    """Tokens at odd and even places, drafts that are verified, entries that are cached, rows below their window's
    start, and padding: all of them in steps of 7 rows and more."""
    if rows == 1:
        return Case([Piece(33, 1, 0, ())], 1, 0, SHARED + 1)
    pieces = [Piece(0, 1, 0, ()), Piece(33, 1, 1, (), cached=34), Piece(125, 4, 2, (), window_start=126)]
    dead = max(1, rows // 8)
    starts = np.random.default_rng(rows).integers(0, 128 * PAGES, rows - 6 - dead).tolist()
    pieces += [Piece(t, 1, 3 + i, ()) for i, t in enumerate(starts)]
    return Case(pieces, 1, dead, SHARED + rows)


@cache
def prefill(shift: int) -> Case:
    """Chunks that begin and end at any place of groups, blocks and rings, some longer than both rings: two that
    overwrite the pair that they read. Every `shift` is the same program."""
    pieces = [
        Piece(9, 45, 2, (), window_start=20, cached=16),
        Piece(0, 7, 1, ()),
        Piece(63, 9, 0, ()),
        Piece(5, 1, 3, ()),
        Piece(1, 300, 4, (), window_start=250),
        Piece(1000, 61, 5, (), cached=1024),
        Piece(121, 128, 6, ()),
    ]
    for piece in pieces:
        piece.start += shift
    return Case(pieces, TILE, 1, 256)


STEPS = [(decode, 1), (decode, 7), (decode, 64), (decode, 256), (prefill, 0), (prefill, 1), (prefill, 64)]
IDS = [f"{make.__wrapped__.__name__}-{number}" for make, number in STEPS]


@pytest.fixture(scope="module", params=STEPS, ids=IDS)
def case(request: pytest.FixtureRequest) -> Case:
    make, number = request.param
    made: Case = make(number)
    return made


def neighbours(codec: Any, mine: np.ndarray, right: np.ndarray) -> None:
    """Records that decode to the same values or the next ones of their format."""
    with on_host():
        values, expected = (np.asarray(codec.decode(jnp.asarray(x))) for x in (mine, right))
    group = np.abs(expected).reshape(len(right), -1, codec.group).max(axis=-1).repeat(codec.group, axis=-1)
    # e4m3: an eighth of a value, of small ones 2^-9 of the scale; e2m1: up to 2 of 6.
    step = np.abs(expected) / 8 + group * 2.0**-16 if codec == QUANTIZED.window else 0.34 * group
    assert (np.abs(values - expected) <= step + 1e-6).all()


def stored(case: Case, name: str, after: np.ndarray) -> dict[int, np.ndarray]:
    """Records of the pool of a name that groups became, by source."""
    places = {source: [g.place for g in groups if g.place] for source, groups in case.groups.items()}
    return {source: np.stack([after[p] for p in some]) for source, some in places.items() if some}


def test_records_are_right_and_nothing_else_is_written(case: Case) -> None:
    caches, latents = case.run(KERNEL)
    with on_host():
        check(case, caches, latents)


def check(case: Case, caches: dict[str, np.ndarray], latents: dict[int, np.ndarray]) -> None:
    expected = {name: a.copy() for name, a in case.caches.items()}

    for source, groups in case.groups.items():
        kept = [i for i, g in enumerate(groups) if g.place]
        positions = [groups[i].position for i in kept]
        if not groups:
            continue
        # Rounded once, and once more where pooled: next to a boundary to its other side.
        mine, right = latents[source].astype(np.float32), np.stack([g.latent for g in groups]).astype(np.float32)
        np.testing.assert_allclose(mine, right, rtol=2.0**-7 * CONFIG.kv_source_ratios[source], atol=1e-5)
        assert (mine != right).mean() <= FLIPS
        if not kept:
            continue
        mine = stored(case, "pool", caches["pool"])[source]
        vectors = rotated(latents[source][kept], positions)
        agree(QUANTIZED.compressed, mine, vectors, FLIPS)
        unrotated = [*range(224), *range(256, 284)]  # values and scales of 448 channels: not a code differs
        np.testing.assert_array_equal(mine[:, unrotated], exactly(QUANTIZED.compressed, vectors)[:, unrotated])
        keys = norm(case.arrays[f"key{source}"][[groups[i].made for i in kept]], case.arrays["key_norm"][source])
        agree(QUANTIZED.index, stored(case, "keys", caches["keys"])[source], rotated(keys, positions), FLIPS)
        for i in kept:
            for name in ("pool", "keys"):
                place = groups[i].place
                expected[name][place] = caches[name][place]

    rows, places = case.windows(PROJECTED)
    positions = np.asarray(case.rows.position)[rows].tolist()
    vectors = rotated(norm(case.arrays["projected"][rows], case.arrays["kv_norm"][PROJECTED]), positions)
    agree(QUANTIZED.window, caches["window"][places], vectors, FLIPS)
    neighbours(QUANTIZED.window, caches["window"][places], exactly(QUANTIZED.window, vectors))
    expected["window"][places] = caches["window"][places]
    for i, kv in enumerate(case.arrays["kv"]):
        rows, places = case.windows(FIRST + i)
        expected["window"][places] = np.asarray(QUANTIZED.window.encode(jnp.asarray(kv[rows])))
    for row, piece, t in case.valid:
        expected["pairs"][case.ordinal, piece.slot, t % PAIRS] = (
            case.arrays["gate"][row],
            case.arrays[f"latent{POOLED}"][row],
        )
    for name, array in expected.items():
        assert_same_bits(caches[name], array)
    assert (caches["window"] != CANARY).any()


def test_against_the_reference(case: Case) -> None:
    """The same bytes are written, and all decode to neighbouring values."""
    (mine, latents), (right, others) = case.run(KERNEL), case.run("reference")
    assert_same_bits(mine["pairs"], right["pairs"])
    assert_same_bits(mine["window"][FIRST:], right["window"][FIRST:])
    for source in latents:
        # The reference may keep what it pools, or norms, unrounded on the way.
        np.testing.assert_allclose(
            latents[source].astype(np.float32), others[source].astype(np.float32), rtol=2.0**-6, atol=1e-5
        )
    for name, codec in (("pool", QUANTIZED.compressed), ("keys", QUANTIZED.index), ("window", QUANTIZED.window)):
        written = (mine[name] != CANARY).any(axis=-1)
        np.testing.assert_array_equal(written, (right[name] != CANARY).any(axis=-1))
        a, b = mine[name][written], right[name][written]
        assert (a != b).mean() <= REFERENCE_FLIPS
        neighbours(codec, a, b)


def test_runs_are_equal_bit_by_bit(case: Case) -> None:
    assert_same_bits(case.run(KERNEL), case.run(KERNEL))


@pytest.mark.parametrize("make, number", [STEPS[1], STEPS[4]], ids=[IDS[1], IDS[4]])
def test_nothing_valid_stores_nothing(make: Any, number: int) -> None:
    case = make(number)
    valid, count = (np.zeros_like(x) for x in (case.rows.valid, case.rows.count))
    empty = dataclasses.replace(case.rows, valid=valid, count=count)
    assert_same_bits(case.run(KERNEL, empty)[0], case.caches)


@pytest.mark.parametrize("make, number", [STEPS[3], STEPS[4]], ids=[IDS[3], IDS[4]])
def test_caches_stay_where_they_are(make: Any, number: int) -> None:
    """Donated caches are the results' memory, and no copy of a pool is held beside them."""
    case = make(number)
    caches, arrays = case.start(), {name: jnp.asarray(a) for name, a in case.arrays.items()}
    compiled = step.lower(caches, arrays, case.rows, layout=case.layout, implementation=KERNEL).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < min(case.caches[name].nbytes for name in ("pool", "keys"))
    places = {name: a.unsafe_buffer_pointer() for name, a in caches.items()}
    after, _ = compiled(caches, arrays, case.rows)
    assert {name: a.unsafe_buffer_pointer() for name, a in after.items()} == places
    assert all(a.is_deleted() for a in caches.values())
