"""The device side of the engine: compiled steps over buckets, the donated state, and nothing of scheduling."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from di_jax.engine.compiling import compile_together, compile_workers
from di_jax.engine.extra_sampling import SlotState
from di_jax.engine.launch_thread import LaunchThread, done
from di_jax.engine.sampler import sample
from di_jax.engine.sampling_programs import SamplingPrograms
from di_jax.engine.speculative_programs import DraftSettings, SpeculativePrograms, Verification, abstract
from di_jax.engine.speculative_steps import verify
from di_jax.engine.state_programs import Snapshot, StateCopies, StatePrograms
from di_jax.engine.step_output import DraftOutput, StepOutput, VerifiedOutput
from di_jax.engine.step_plan import REPLAY_FIELDS, Bucket, StepPlan
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.dspark import DraftModel
from di_jax.model.moe import slot_tables
from di_jax.model.rows import Rows, make_rows
from di_jax.model.transformer import Transformer
from di_jax.parallel.expert_moves import MovePlan
from di_jax.parallel.expert_weights import move_program
from di_jax.parallel.mesh import DeviceMesh, rows_of_ranks
from di_jax.platforms.compiler import XLA_DEFAULTS, Compiler

logger = logging.getLogger(__name__)

TOKENS, LOGITS, TRACE = "tokens", "logits", "trace"


def step(
    graphs: Sequence[Any],
    plan: DeviceMesh,
    layout: CacheLayout,
    bucket: Bucket,
    outputs: str,
    params: Sequence[Any],
    state: EngineState,
    buffer: Array,
) -> tuple[StepOutput, EngineState]:
    """One rank's step of the model inside `shard_map`: forward, head and sampling. buffer int32 [1, size]; results
    have a leading axis of one. Raises ValueError, when it is traced, for what the bucket cannot give.

    graphs, params: of the model, and of its draft where the rows are to leave it their context.
    """
    model: Transformer = nnx.merge(graphs[0], params[0])
    if bucket.drops_rows and outputs != TOKENS:
        raise ValueError(f"{outputs} asked of a step that drops rows: {bucket}")
    if model.ngram_hash is not None and not bucket.decode and bucket.history < model.config.engram_look_back:
        raise ValueError(f"the model looks back {model.config.engram_look_back} tokens, the step has {bucket.history}")
    fields = bucket.unpack(buffer[0])
    slot = fields["slot"]
    rows, kept = step_rows(plan, bucket, fields, state)
    grown = jnp.where(fields["count"] > 0, slot, layout.num_slots)
    state = state.replace(length=state.length.at[grown].set(rows.end, mode="drop"))
    out = model(rows, state, layout, kept=kept, trace=outputs == TRACE, taps=len(graphs) > 1)
    hidden, state = out.rows.gathered(out.hidden), out.state
    last = fields["first_row"] if bucket.decode else fields["sample_row"]
    drawn_from = hidden[last] if outputs == TOKENS else None
    logits = model.logits(hidden if drawn_from is None else drawn_from)
    chosen, logprob = sample(
        logits if outputs == TOKENS else logits[last],
        lax.bitcast_convert_type(fields["temperature"], jnp.float32),
        fields["seed_low"],
        fields["seed_high"],
        fields["output_index"],
        fields["forced"],
    )
    # Sequences that are not sampled (chunks before the last, padding) leave their slot alone.
    target = jnp.where(fields["sample"] > 0, slot, layout.num_slots)
    state = state.replace(last_token=state.last_token.at[target].set(chosen, mode="drop"))
    if out.taps is not None:
        drafter: DraftModel = nnx.merge(graphs[1], params[1])
        state = drafter.store_context(out.taps, out.rows, state, layout)
    if state.draft_token is not None:
        # Drafts that the slot still has are another sequence's, or follow another token.
        state = state.replace(draft_token=state.draft_token.at[target].set(-1, mode="drop"))
    trace = [jax.tree.map(jax.vmap(rows.gathered), run) for run in out.traces] if outputs == TRACE else None
    told = None if outputs == TOKENS else logits
    result = StepOutput(chosen, logprob, told, trace, out.load, model.host_tables, drawn_from)
    return jax.tree.map(lambda a: a[None], result), state


def step_rows(
    plan: DeviceMesh, bucket: Bucket, fields: dict[str, Array], state: EngineState
) -> tuple[Rows, Rows | None]:
    """The rows of a rank's step from its unpacked plan, and those that the decoder layers run if some are dropped."""
    token, start = fields["token"], fields["start"]
    if bucket.decode:
        token = jnp.where(token < 0, state.last_token[fields["slot"]], token)
        start = jnp.where(start < 0, state.length[fields["slot"]], start)
    rows = make_rows(
        token,
        fields["tile_sequence"],
        start,
        fields["first_row"],
        fields["count"],
        fields["slot"],
        fields["block_table"],
        decode=bucket.decode,
        seed=lax.bitcast_convert_type(fields["seed_low"] ^ fields["seed_high"], jnp.uint32),
        **{name: fields[name] for name in REPLAY_FIELDS if name in fields},
    )
    kept = None
    if bucket.drops_rows:
        kept = rows.kept(bucket.kept_rows, fields["kept_tile_sequence"], fields["kept_first_row"])
    if bucket.cp > 1:
        axes = plan.axes("sequence")
        rows = rows.share(fields["own_tiles"], fields["home"], axes)
        if kept is not None:
            kept = kept.share(fields["kept_own_tiles"], fields["kept_home"], axes)
    return rows, kept


class ModelRunner:
    """Runs step plans on a mesh. Owns the weights and the state; every step donates the state and replaces it.

    mesh: of the model's `parallel.mesh`; by default on the first devices. draft, settings: of decode steps that verify
    drafts; neither or both. local_ranks: numbers of the ranks that this process hosts, ascending. resets: how often the
    state was emptied because a step did not finish. Whoever sees it change has to give up the sequences that it had in
    the caches. thread: launches the programs of decode steps with drafts while the host goes on; what else needs the
    state waits for it. One thread at a time may call.
    """

    def __init__(
        self,
        model: Transformer,
        layout: CacheLayout,
        mesh: jax.sharding.Mesh | None = None,
        draft: DraftModel | None = None,
        settings: DraftSettings | None = None,
        compiler: Compiler = XLA_DEFAULTS,
        thread: LaunchThread | None = None,
    ) -> None:
        self.layout, self.parallel, self.plan = layout, model.parallel, model.parallel.mesh
        self.mesh = self.plan.build() if mesh is None else mesh
        self.graph, self.params = nnx.split(model)
        self._hidden_dtype = model.numerics.dtype
        self._compiler = compiler
        self._buffers = NamedSharding(self.mesh, PartitionSpec(self.plan.rank_axes))
        places = self._buffers.addressable_devices_indices_map((self.plan.world,))
        self.local_ranks = sorted(index[0].indices(self.plan.world)[0] for index in places.values() if index)
        wanted = layout.global_abstract(self.mesh, self.plan)
        # Zeroed caches, made where they live.
        self._allocate = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), wanted),
            out_shardings=jax.tree.map(lambda s: s.sharding, wanted),
        )
        self._state = self._allocate()
        self._thread = thread
        self.resets = 0
        self._compiled: dict[tuple[Bucket, str], Any] = {}
        self._move: Any = None
        self._programs = StatePrograms(self.mesh, self.plan, layout, self._compiler)
        head: Any = self.params["head"]
        spec: Any = parameter_specs(self.params, self.plan)["head"]["weight"]
        weight = head["weight"].get_value()
        self._sampling = SamplingPrograms(self.mesh, self.plan, layout, weight, spec.get_value(), compiler)
        self._sampling.reset()
        self._draft: tuple[Any, Any] | None = None
        self._speculative: SpeculativePrograms | None = None
        if draft is not None and settings is not None:
            self._draft = graph, params = nnx.split(draft)
            graphs, specs = (
                (self.graph, graph),
                (parameter_specs(self.params, self.plan), parameter_specs(params, self.plan)),
            )
            self._speculative = SpeculativePrograms(
                self.mesh, self.plan, layout, settings, graphs, specs, self._hidden_dtype, compiler
            )
        self._lock = threading.Lock()

    @property
    def state(self) -> EngineState:
        """Caches and slots as all that was launched leaves them."""
        self.settle()
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state

    def settle(self) -> None:
        """Waits until everything is launched. What failed in it is told by its result."""
        if self._thread is not None:
            self._thread.settle()

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be launched."""
        return self._thread is None or self._thread.idle

    @property
    def speculates(self) -> bool:
        """Whether it has a draft: decode steps are `verify`, `accept` and `draft`."""
        return self._draft is not None

    @property
    def load_shape(self) -> tuple[int, int]:
        """Of `StepOutput.load`: layers and expert slots."""
        experts: Any = self.params["layers"]["ffn"]
        layers, slots = experts["experts"]["w1"]["weight"].get_value().shape[:2]
        return layers, slots

    def lower(self, bucket: Bucket, outputs: str = TOKENS) -> Any:
        """The step of a bucket, lowered but not compiled; of one with drafts its first program."""
        layout, draft = self.layout, self._draft
        return trace_step(self.graph, self.params, self.mesh, self.plan, layout, bucket, outputs, draft).lower()

    def compiled(self, bucket: Bucket, outputs: str = TOKENS) -> Any:
        """The executable of a bucket, compiled at first use."""
        executable = self._compiled.get((bucket, outputs))
        if executable is None:
            executable = self._compiler(self.lower(bucket, outputs))
            with self._lock:
                self._compiled[bucket, outputs] = executable
        return executable

    def warm_up(self, buckets: Iterable[Bucket], outputs: str = TOKENS, *, workers: int | None = None) -> None:
        """Compiles every bucket ahead of time, as `compile_together`."""
        workers = compile_workers() if workers is None else workers
        buckets = list(buckets)
        jobs: list[Callable[[], Any]] = [
            partial(self.compiled, b, outputs) for b in buckets if (b, outputs) not in self._compiled
        ]
        if outputs == TOKENS:
            jobs += self._sampling_jobs(buckets)
        if not jobs:
            return
        logger.info("compiling %d step shapes, %d at a time", len(jobs), workers)
        compile_together(jobs, workers)

    def _sampling_jobs(self, buckets: Sequence[Bucket]) -> list[Callable[[], Any]]:
        """What compiles `begin_answers`, and after steps of these buckets `resample` or `accept` and `draft`."""
        plain = (bucket.sequences for bucket in buckets if not bucket.drafts)
        jobs = self._sampling.jobs(plain, self._hidden_dtype)
        if self._speculative is not None:
            jobs += self._speculative.jobs(self._weights, self._sampling.abstract_state, buckets)
        return jobs

    def execute(self, plans: Sequence[StepPlan], outputs: str = TOKENS) -> StepOutput:
        """Launches a step and returns at once; its results are on device until `StepOutput.host`.

        plans: one for each of `local_ranks`, all of one bucket. When it is cut short after the state was donated, the
        error goes on up and the state is empty (`resets`).
        """
        if plans[0].bucket.drafts:
            raise ValueError(f"a step with drafts is for `verify`: {plans[0].bucket}")
        self.settle()
        return self._launch(plans, outputs)()

    def _launch(self, plans: Sequence[StepPlan], outputs: str) -> Callable[[], Any]:
        """What launches the step, of which all that the caller may change is taken now."""
        if len(plans) != len(self.local_ranks) or len({plan.bucket for plan in plans}) != 1:
            raise ValueError(f"{len(plans)} step plans for {len(self.local_ranks)} ranks, or of different buckets")
        executable = self.compiled(plans[0].bucket, outputs)
        buffer = rows_of_ranks(self._buffers, np.stack([plan.buffer for plan in plans]))
        weights = (self.params,) if plans[0].bucket.bare else self._weights

        def run() -> Any:
            try:
                output, self._state = executable(weights, self._state, buffer)
            except BaseException as error:
                # An interrupt may fall between the donation and the assignment: the old state is gone, the new one lost
                self._repair()
                if isinstance(error, Exception) and any(leaf.is_deleted() for leaf in jax.tree.leaves(self.params)):
                    lost = "the weights were lost when moving experts failed: start the engine again"
                    raise RuntimeError(lost) from None
                raise
            return output

        return run

    def _later[Result](self, job: Callable[[], Result]) -> Result | Future[Result]:
        return job() if self._thread is None else self._thread.submit(job)

    @property
    def _weights(self) -> Any:
        return (self.params,) if self._draft is None else (self.params, self._draft[1])

    # A decode step with drafts: the three are called in this order by all processes alike, return at once and leave an
    # empty state as `execute` does when they are cut short. With a thread they return what is `done` once it launched
    # them, and who waits for that learns of their errors.

    def verify(self, plans: Sequence[StepPlan]) -> Verification | Future[Verification]:
        """Launches the target on the newest tokens and on drafts. plans: as of `execute`, of a bucket with drafts."""
        if not plans[0].bucket.drafts:
            raise ValueError(f"a step without drafts is for `execute`: {plans[0].bucket}")
        return self._later(self._launch(plans, TOKENS))

    def accept(
        self,
        verification: Verification | Future[Verification],
        rows: Sequence[np.ndarray] | None = None,
        allowed: Sequence[np.ndarray] | None = None,
    ) -> VerifiedOutput | Future[VerifiedOutput]:
        """What the verified step emits.

        rows: for requests of extra sampling, int32 [OF_REQUEST, R] for each of `local_ranks`, NEUTRAL for the others.
        allowed: with `rows`, int32 [R, k + 1, ceil(V / 32)]: the ids that may stand at each place of a block, those of
        bit i of word w being 32 w + i. The first masks of a shape compile its program: `warm_up` leaves it out, as an
        engine does not know whether there will ever be a matcher.
        """
        programs, weights = self._with_drafts, self._weights

        def run() -> VerifiedOutput:
            found, slots = done(verification), self._sampling.state
            assert slots is not None
            try:
                answer, self._state, self._sampling.state = programs.accept(
                    weights, self._state, slots, found, rows, allowed
                )
            except BaseException:
                self._repair()
                raise
            return dataclasses.replace(answer, load=found.load, host_tables=found.host_tables)

        return self._later(run)

    def draft(self, rows: Sequence[np.ndarray]) -> DraftOutput | Future[DraftOutput]:
        """Drafts what follows the newest tokens of sequences; they wait in the slots for the next `verify`.

        rows: int32 [DRAFT_COLUMNS, R] for each of `local_ranks`.
        """
        programs, weights = self._with_drafts, self._weights

        def run() -> DraftOutput:
            try:
                output, self._state = programs.draft(weights, self._state, rows)
            except BaseException:
                self._repair()
                raise
            return output

        return self._later(run)

    @property
    def _with_drafts(self) -> SpeculativePrograms:
        if self._speculative is None:
            raise ValueError("the runner was made without a draft")
        return self._speculative

    def resample(
        self, output: StepOutput, rows: Sequence[np.ndarray], allowed: Sequence[np.ndarray] | None = None
    ) -> StepOutput:
        """Draws tokens of the step launched last in place of the plain ones (`sampling_programs`). Returns at once.

        rows: of `extra_sampling.pack_rows`, one for each of `local_ranks`. allowed: as of `accept`, of one place,
        for sequences that are drawn here. All processes call it, or none.
        """
        if output.hidden is None:
            raise ValueError("the step left no hidden rows: it was asked for logits")
        try:
            token, logprob, top, last_token = self._sampling.sample(
                self.state.last_token, output.hidden, output.token, output.logprob, rows, allowed
            )
            self.state = self.state.replace(last_token=last_token)
        except BaseException:
            self.repair()
            raise
        return dataclasses.replace(output, token=token, logprob=logprob, hidden=None, top=top)

    # Between steps, by all processes alike and with an entry for each of `local_ranks`. They return at once, and follow
    # the steps that were launched before. When one is cut short after the state was donated, it is as for a step.

    def warm_up_programs(self, snapshot_layers: int | None) -> None:
        """Compiles what `copy`, `snapshot` and `restore` run. snapshot_layers: None when there will be no snapshots.

        Raises ValueError for caches of which no snapshot can be taken.
        """
        self._programs.warm_up(snapshot_layers)

    def copy(self, copies: Sequence[StateCopies], launches: int | None = None) -> None:
        """Copies blocks and slots for forks. launches: the most of any rank of the mesh; by default of these ranks."""
        if launches is None:
            launches = max(own.launches for own in copies)
        self._change(lambda state: self._programs.copy(state, copies, launches))

    def snapshot(self, slots: Sequence[int], layers: int) -> Snapshot:
        """Window rings of the first `layers` layers of a slot of each rank; of none where it is `NOTHING`."""
        return self._programs.snapshot(self.state, slots, layers)

    def restore(self, slots: Sequence[int], rings: Sequence[np.ndarray | None], layers: int) -> None:
        """Puts rings of a snapshot into a slot of each rank; the other ranks have slot `NOTHING` and rings None."""
        self._change(lambda state: self._programs.restore(state, slots, rings, layers))

    def begin_answers(self, slots: Sequence[int], states: Sequence[SlotState | None]) -> None:
        """Writes what `resample` keeps of an answer into a slot of each rank; NO_SLOT and None where none begins."""
        self.settle()
        try:
            self._sampling.begin(slots, states)
        except BaseException:
            self.repair()
            raise

    def _change(self, program: Callable[[EngineState], EngineState]) -> None:
        try:
            self.state = program(self.state)
        except BaseException:
            self.repair()
            raise

    def move_experts(self, layer: int, moves: MovePlan, slot_experts: np.ndarray) -> None:
        """Rearranges the experts of a backbone layer: `moves` of all layers, slot_experts int32 [L, slots] afterwards.

        To be called between steps; the steps that were launched before run on the old weights. When the device fails
        in it the weights are lost, as they are after a failed load: every later step says so.
        """
        self.settle()
        ffn: Any = self.params["layers"]["ffn"]
        if self._move is None:
            specs = parameter_specs(self.params, self.plan)["layers"]["ffn"]["experts"]
            self._move = move_program(self.mesh, self.plan, specs)
        tables = slot_tables(slot_experts, ffn["num_replicas"].get_value().shape[1])
        placed = jax.device_put(tables, NamedSharding(self.mesh, PartitionSpec()))
        ffn["experts"] = self._move(ffn["experts"], np.int32(layer), moves.action[layer], moves.source[layer])
        for name, table in placed.items():
            ffn[name] = table

    def repair(self) -> None:
        """Empties the state if a step took it and gave none back."""
        self.settle()
        self._repair()

    def _repair(self) -> None:
        if self._sampling.lost or any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            self._reset()

    def reset(self) -> None:
        """Empties the state. For when it may hold the result of a failed step; nothing in it survives."""
        self.settle()
        self._reset()

    def _reset(self) -> None:
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()  # before the new ones are made: the device need not hold both
        self._sampling.reset()
        self._state = self._allocate()
        self.resets += 1


def parameter_specs(params: Any, plan: DeviceMesh) -> Any:
    """PartitionSpecs of a model's state, in its structure: by the logical axes of each weight, else replicated."""

    def spec(variable: Any) -> Any:
        logical = variable.get_metadata().get("logical_axes")
        return variable.replace(plan.spec(logical) if logical else PartitionSpec())

    return nnx.from_flat_state({path: spec(leaf) for path, leaf in nnx.to_flat_state(params)})


def trace_step(
    graph: Any,
    params: Any,
    mesh: jax.sharding.Mesh,
    plan: DeviceMesh,
    layout: CacheLayout,
    bucket: Bucket,
    outputs: str = TOKENS,
    draft: tuple[Any, Any] | None = None,
) -> Any:
    """The step of a bucket over a mesh, lowered from arrays or from ShapeDtypeStructs alone: nothing runs.

    draft: graph and params of the draft; a bucket with drafts needs it and gives `verify`, a bare one goes without.
    """
    draft = None if bucket.bare else draft
    graphs: Any = (graph,) if draft is None else (graph, draft[0])
    weights = (params,) if draft is None else (params, draft[1])
    specs = tuple(parameter_specs(each, plan) for each in weights)
    state = layout.global_abstract(mesh, plan)
    state_specs = jax.tree.map(lambda s: s.sharding.spec, state)
    ranks = PartitionSpec(plan.rank_axes)
    if bucket.drafts:
        rank_step: Any = partial(verify, graphs, layout, bucket)
    else:
        rank_step = partial(step, graphs, plan, layout, bucket, outputs)
    body = jax.shard_map(
        rank_step,
        mesh=mesh,
        in_specs=(specs, state_specs, ranks),
        out_specs=(ranks, state_specs),
        check_vma=False,  # loops whose trip count is agreed by pmax are beyond what it can prove
    )
    buffer = jax.ShapeDtypeStruct((plan.world, bucket.size), jnp.int32, sharding=NamedSharding(mesh, ranks))
    program = jax.jit(body, donate_argnums=1)
    return program.trace(abstract(weights, specs, mesh), state, buffer)
