"""Programs that maintain the state between steps: what they write, what they leave alone, what they cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_model import REAL, TINY, tiny_model, tiny_numerics
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.compile_counter import COMPILATIONS
from di_jax.engine.runner import ModelRunner
from di_jax.engine.state_programs import NOTHING, PAIRS, StateCopies, StatePrograms, check_closed_groups, snapshot
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.quantization import CacheFormats
from di_jax.parallel.mesh import DeviceMesh

PLAN = DeviceMesh(dp=2)
LAYOUT = CacheLayout(TINY, CacheFormats.quantized(), num_blocks=24, num_slots=12)
ENCODER = TINY.candidate_source_layer_id
AXES = {name: axes for name, axes in CacheLayout.logical_axes().items() if getattr(LAYOUT.abstract(), name) is not None}

Host = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def programs() -> StatePrograms:
    made = StatePrograms(PLAN.build(), PLAN, LAYOUT)
    made.warm_up(ENCODER)
    return made


def random_state(programs: StatePrograms, seed: int) -> EngineState:
    """Every element of every cache another number, as far as its type has them."""
    rng = np.random.default_rng(seed)

    def filled(spec: Any) -> jax.Array:
        return jax.device_put(rng.integers(0, 250, spec.shape).astype(spec.dtype), spec.sharding)

    return jax.tree.map(filled, programs.layout.global_abstract(programs.mesh, programs.plan))


def on_host(state: EngineState, world: int = PLAN.world) -> list[Host]:
    """The caches of each rank."""
    ranks: list[Host] = [{} for _ in range(world)]
    for name, axes in AXES.items():
        at = axes.index("blocks" if "blocks" in axes else "slots")
        for rank, part in zip(ranks, np.split(np.array(getattr(state, name)), world, axis=at)):
            rank[name] = part
    return ranks


def copied(caches: Host, copies: StateCopies) -> Host:
    """`copies`, one by one."""
    after = {name: array.copy() for name, array in caches.items()}
    for name, axes in AXES.items():
        pairs, kind = (copies.blocks, "blocks") if "blocks" in axes else (copies.slots, "slots")
        at = (slice(None),) * axes.index(kind)
        for source, target in pairs if name != "last_token" else ():
            after[name][(*at, target)] = caches[name][(*at, source)]
    return after


def assert_equal(found: Sequence[Host], wanted: Sequence[Host]) -> None:
    for rank, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for name in AXES:
            np.testing.assert_array_equal(one[name], other[name], err_msg=f"{name} of rank {rank}")


@st.composite
def pairs(draw: st.DrawFn, count: int) -> list[tuple[int, int]]:
    """Copies among `count` blocks or slots: sources may repeat, targets not."""
    numbers = draw(st.permutations(range(count)))
    targets = numbers[: draw(st.integers(0, count - 1))]
    return [(draw(st.sampled_from(numbers[len(targets) :])), target) for target in targets]


copies_of_a_rank = st.builds(StateCopies, pairs(LAYOUT.num_blocks), pairs(LAYOUT.num_slots))


@given(st.tuples(copies_of_a_rank, copies_of_a_rank), st.integers(0, 2**32 - 1), st.integers(0, 2))
def test_copies_are_exact_and_touch_nothing_else(
    programs: StatePrograms, copies: tuple[StateCopies, StateCopies], seed: int, idle: int
) -> None:
    """Also with more launches than a rank needs, and with none."""
    state = random_state(programs, seed)
    wanted = [copied(caches, own) for caches, own in zip(on_host(state), copies)]
    launches = max(own.launches for own in copies) + idle
    assert_equal(on_host(programs.copy(state, copies, launches)), wanted)


def test_ranks_of_a_context_parallel_mesh_come_in_their_order() -> None:
    """Each gets what is for it, and gives what it has."""
    plan = DeviceMesh(dp=4, cp=2, ep=4)
    programs = StatePrograms(plan.build(), plan, LAYOUT)
    state, world = random_state(programs, 3), plan.world
    before = on_host(state, world)
    slots = [NOTHING if rank == 5 else rank for rank in range(world)]
    rings = programs.snapshot(state, slots, ENCODER).host()
    for caches, slot, ring in zip(before, slots, rings):
        if ring is not None:
            np.testing.assert_array_equal(ring, caches["window"][:ENCODER, slot])
    copies = [StateCopies([(rank, 20)], [(10, rank)]) for rank in range(world)]
    wanted = [copied(caches, own) for caches, own in zip(before, copies)]
    for caches, ring in zip(wanted, rings):
        if ring is not None:
            caches["window"][:ENCODER, 11] = ring
    targets = [NOTHING if ring is None else 11 for ring in rings]
    state = programs.restore(programs.copy(state, copies, 1), targets, rings, ENCODER)
    assert_equal(on_host(state, world), wanted)


def test_a_fork_keeps_its_own_last_token(programs: StatePrograms) -> None:
    """And takes over everything else that a slot has, in every layer."""
    before = random_state(programs, 1)
    caches = on_host(before)[1]
    fork = on_host(programs.copy(before, [StateCopies(), StateCopies(slots=[(3, 7)])], 1))[1]
    for name, axes in AXES.items():
        if "slots" in axes:
            source = caches[name].take(3, axis=axes.index("slots"))
            target = fork[name].take(7, axis=axes.index("slots"))
            kept = caches[name].take(7, axis=axes.index("slots"))
            np.testing.assert_array_equal(target, kept if name == "last_token" else source)
            assert (source != kept).any(), "or this test sees nothing"


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        (StateCopies(blocks=[(0, 1), (2, 1)]), r"copies of blocks .* named twice"),
        (StateCopies(slots=[(0, 1), (1, 2)]), r"copies of slots .* or is a source too"),
        (StateCopies(slots=[(0, LAYOUT.num_slots)]), r"copies of slots .*: there are 12, counted from 0"),
        (StateCopies(blocks=[(NOTHING, 0)]), r"copies of blocks .*: there are 24, counted from 0"),
        (StateCopies(blocks=[(0, n) for n in range(1, PAIRS + 2)]), "1 launches for copies that need 2"),
    ],
)
def test_copies_that_cannot_be_meant_are_refused(programs: StatePrograms, copies: StateCopies, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        programs.copy(random_state(programs, 0), [StateCopies(), copies], 1)


@given(st.tuples(*[st.integers(NOTHING, LAYOUT.num_slots - 1)] * 4), st.integers(0, 2**32 - 1))
def test_a_snapshot_comes_back_byte_for_byte(
    programs: StatePrograms, slots: tuple[int, int, int, int], seed: int
) -> None:
    """Into other slots, after everything has changed; other slots, layers, ranks and caches stay as they are."""
    sources, state = slots[:2], random_state(programs, seed)
    taken = [caches["window"] for caches in on_host(state)]
    rings = programs.snapshot(state, sources, ENCODER).host()
    for slot, window, ring in zip(sources, taken, rings):
        assert (ring is None) == (slot == NOTHING)
        if ring is not None:
            np.testing.assert_array_equal(ring, window[:ENCODER, slot])
    targets = [NOTHING if ring is None else slot for ring, slot in zip(rings, slots[2:])]
    rings = [None if slot == NOTHING else ring for ring, slot in zip(rings, targets)]
    other = random_state(programs, seed + 1)
    wanted = on_host(other)
    for caches, slot, ring in zip(wanted, targets, rings):
        if ring is not None:
            caches["window"][:ENCODER, slot] = ring
    assert_equal(on_host(programs.restore(other, targets, rings, ENCODER)), wanted)


def test_a_snapshot_of_all_layers(programs: StatePrograms) -> None:
    state, layers = random_state(programs, 5), TINY.num_hidden_layers
    window = on_host(state)[0]["window"]
    ring = programs.snapshot(state, [11, NOTHING], layers).host()[0]
    assert ring is not None
    np.testing.assert_array_equal(ring, window[:, 11])
    with pytest.raises(ValueError, match=r"a snapshot of 99 layers: the caches have window rings of 10"):
        programs.snapshot(state, [11, NOTHING], 99)


def test_a_snapshot_outlives_the_state(programs: StatePrograms) -> None:
    """It is of the moment of the call, whatever happens to the slot before its bytes are on the host."""
    state = random_state(programs, 8)
    window = on_host(state)[0]["window"][:ENCODER, 4].copy()
    taken = programs.snapshot(state, [4, NOTHING], ENCODER)
    state = programs.restore(state, [4, NOTHING], [np.zeros_like(window), None], ENCODER)
    assert not on_host(state)[0]["window"][:ENCODER, 4].any()
    ring = taken.host()[0]
    assert ring is not None
    np.testing.assert_array_equal(ring, window)


def test_rings_of_other_caches_are_refused(programs: StatePrograms) -> None:
    shape = (ENCODER, TINY.window_ring, LAYOUT.abstract().window.shape[-1])
    state, ring = random_state(programs, 0), np.zeros(shape, np.uint8)
    for slots, rings, message in (
        ([0, NOTHING], [ring[1:], None], r"window rings uint8\[5, .* for caches of uint8\[6, "),
        ([0, NOTHING], [ring.astype(np.float32), None], "window rings float32"),
        ([0, NOTHING], [None, None], "rings for some that are none, or none for others"),
        ([NOTHING, NOTHING], [ring, None], "rings for some that are none, or none for others"),
        ([12, NOTHING], [ring, None], "there are 12, counted from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            programs.restore(state, slots, rings, ENCODER)
    with pytest.raises(ValueError, match="there are 12, counted from 0"):
        programs.snapshot(state, [12, 0], ENCODER)


def test_groups_that_stay_open_at_a_blocks_end_are_refused() -> None:
    """Their compressor rings would belong into a snapshot."""
    check_closed_groups(LAYOUT)
    ratios = tuple(3 if ratio == 2 else ratio for ratio in TINY.compress_ratios)
    layout = dataclasses.replace(LAYOUT, config=dataclasses.replace(TINY, compress_ratios=ratios))
    message = r"compress_ratios: 3 of layer \d+ does not divide blocks of 128 tokens"
    with pytest.raises(ValueError, match=message):
        check_closed_groups(layout)
    with pytest.raises(ValueError, match=message):
        StatePrograms(PLAN.build(), PLAN, layout).warm_up(ENCODER)


def nbytes(tree: Any) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.parametrize(("name", "layers"), [("take", 0), ("put", 0), ("snapshot", ENCODER), ("restore", ENCODER)])
def test_the_caches_are_never_copied(programs: StatePrograms, name: str, layers: int) -> None:
    """What changes the state reuses every byte of it; and beside the state all need the same, however large it is."""
    larger = StatePrograms(programs.mesh, PLAN, dataclasses.replace(LAYOUT, num_blocks=500, num_slots=100))
    few, many = (p.compiled(name, layers).memory_analysis() for p in (programs, larger))
    for memory, caches in ((few, programs), (many, larger)):
        changed = nbytes(caches.layout.abstract()) if name in ("put", "restore") else 0
        assert memory.alias_size_in_bytes == changed
    assert many.temp_size_in_bytes == pytest.approx(few.temp_size_in_bytes, abs=1024)


def test_released_snapshot() -> None:
    """Rings of the 20 encoder layers: 1,415,040 bytes a sequence; of all 40, twice that (numerics 4)."""
    layout = CacheLayout(REAL, CacheFormats.quantized(), num_blocks=3, num_slots=2)
    slot = jax.ShapeDtypeStruct((1,), jnp.int32)
    for layers in (REAL.candidate_source_layer_id, REAL.num_hidden_layers):
        rings = jax.eval_shape(partial(snapshot, layers), layout.abstract(), slot)
        assert rings.shape == (1, layers, 134, 528)
        assert nbytes(rings) == layers * 70_752
    assert REAL.candidate_source_layer_id * 70_752 == 1_415_040
    check_closed_groups(layout)


# ---- the runner's part ----


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    numerics = tiny_numerics("kvq")
    made = ModelRunner(tiny_model(numerics), CacheLayout(TINY, numerics.formats, num_blocks=8, num_slots=4))
    made.warm_up_programs(ENCODER)
    return made


def everything(runner: ModelRunner, ring: np.ndarray) -> None:
    runner.copy([StateCopies([(0, 1)], [(0, 1)])])
    runner.restore([2], [ring], ENCODER)
    runner.snapshot([2], ENCODER).host()


def test_nothing_compiles_once_they_are_warm(runner: ModelRunner) -> None:
    ring = np.ones((ENCODER, *runner.state.window.shape[2:]), np.uint8)
    before = COMPILATIONS.count
    everything(runner, ring)
    everything(runner, ring)
    runner.copy([StateCopies()], launches=3)
    assert COMPILATIONS.count == before


def test_the_runner_goes_on_with_the_changed_state(runner: ModelRunner) -> None:
    runner.reset()
    ring = np.random.default_rng(0).integers(0, 250, (ENCODER, *runner.state.window.shape[2:])).astype(np.uint8)
    runner.restore([0], [ring], ENCODER)
    runner.copy([StateCopies(slots=[(0, 3)])])
    window = np.asarray(runner.state.window)
    np.testing.assert_array_equal(window[:ENCODER, 3], ring)
    assert not window[:, 1:3].any() and not window[ENCODER:].any()
    taken = runner.snapshot([3], ENCODER).host()[0]
    assert taken is not None
    np.testing.assert_array_equal(taken, ring)


class Interrupt(BaseException):
    """What Ctrl-C raises, told apart from a real one."""


@pytest.mark.parametrize("name", ["put", "restore"])
def test_one_cut_short_after_the_donation_leaves_an_empty_state(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ring = np.ones((ENCODER, *runner.state.window.shape[2:]), np.uint8)
    runner.restore([0], [ring], ENCODER)
    programs, resets = runner._programs, runner.resets
    made = programs.compiled

    def compiled(asked: str, layers: int = 0) -> Any:
        def cut_short(*arguments: Any) -> Any:
            made(asked, layers)(*arguments)
            raise Interrupt

        return cut_short if asked == name else made(asked, layers)

    with monkeypatch.context() as patch, pytest.raises(Interrupt):
        patch.setattr(programs, "compiled", compiled)
        everything(runner, ring)
    assert runner.resets == resets + 1
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(runner.state))
    everything(runner, ring)
    assert runner.resets == resets + 1


def test_what_is_refused_leaves_the_state(runner: ModelRunner) -> None:
    resets = runner.resets
    with pytest.raises(ValueError, match="copies of slots"):
        runner.copy([StateCopies(slots=[(0, 4)])])
    assert runner.resets == resets
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(runner.state))
