"""From a config to the parts of an engine: checkpoint, tokenizer, weights on device, caches, compiled-step ladder."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from di_jax.checkpoint.cache import load_or_convert
from di_jax.checkpoint.host_tables import HostTables
from di_jax.checkpoint.hub import resolve_checkpoint
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.config import Config, EplbGroup, SpeculativeGroup
from di_jax.engine.acceptance import PROBABILISTIC
from di_jax.engine.compiling import compile_together
from di_jax.engine.launch_thread import LaunchThread
from di_jax.engine.memory_sizing import (
    StepMemory,
    blocks_per_sequence,
    choose_blocks,
    describe,
    fullest_buckets,
    in_turn,
    program_memory,
    step_memory,
)
from di_jax.engine.runner import (
    LOGITS,
    TOKENS,
    TRACE,
    ModelRunner,
    parameter_specs,
    trace_step,
)
from di_jax.engine.sampling_programs import SamplingPrograms
from di_jax.engine.speculative_programs import DraftSettings, SpeculativePrograms
from di_jax.engine.step_plan import Bucket, BucketLadder
from di_jax.errors import ConfigError
from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig, check_decoder_replay
from di_jax.model.dspark import LEAF_PREFIX, DraftModel, abstract_draft, assemble_draft
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from di_jax.model.moe import FORCED_RATIO
from di_jax.model.quantization import CacheFormats
from di_jax.model.transformer import Transformer, abstract_model, assemble, parameter_paths
from di_jax.parallel import processes
from di_jax.parallel.eplb import num_physical_slots
from di_jax.parallel.mesh import DeviceMesh, Parallel
from di_jax.parallel.replica_choice import forced_slot_factors
from di_jax.platforms.compiler import Compiler
from di_jax.platforms.devices import MemoryRoom, configure_jax, memory_room, require_devices
from di_jax.tokenizer import Tokenizer
from kernels_pallas.choice import KernelChoice

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class EngineParts:
    """Everything that an engine is built from. speculative: off where nothing is drafted."""

    model_config: ModelConfig
    folder: Path
    tokenizer: Tokenizer
    runner: ModelRunner
    ladder: BucketLadder
    layout: CacheLayout
    eplb: EplbGroup = dataclasses.field(default_factory=EplbGroup)
    speculative: SpeculativeGroup = dataclasses.field(default_factory=partial(SpeculativeGroup, enabled=False))


def build_engine_parts(config: Config) -> EngineParts:
    """Loads the model that `config` names and sizes its caches.

    Raises ConfigError, ModelConfigError, CheckpointError or TokenizerMismatchError; each names the key or the file.
    """
    configure_jax(config)
    devices = require_devices(config)
    compiler = Compiler.of(config.platform, devices[0])
    folder = resolve_checkpoint(config.model.path, config.model.revision)
    model_config = ModelConfig.from_file(folder)
    if config.engine.max_model_len > model_config.max_position_embeddings:
        raise ConfigError(
            f"engine.max_model_len: {config.engine.max_model_len} exceeds the model's "
            f"max_position_embeddings = {model_config.max_position_embeddings}"
        )
    replay = config.engine.replay
    if replay.decoder != "off" and config.command != "score":  # scoring computes every row
        check_decoder_replay(model_config, replay.keep_tokens)
    parallel = build_parallel(config, model_config)
    mesh = parallel.mesh.build(devices)
    processes.data_rank_owners(mesh, parallel.mesh)  # said before the minutes that loading may take
    tokenizer = Tokenizer.from_folder(folder, model_config)
    tables = EngramTables.build(model_config, tokenizer.raw) if model_config.engram_layer_ids else None
    numerics = Numerics.create(
        config.model.dtype,
        quantize_caches=config.model.quantize_caches,
        quantize_activations=config.model.quantize_activations,
        wo_a_input=config.model.wo_a_input,
    )
    # What is wrong with its keys is said before the minutes that loading may take.
    ladder = build_ladder(config, model_config.engram_look_back)
    kernels = KernelChoice(config.kernels.implementation, config.kernels.overrides)
    places = parameter_shardings(abstract_model(model_config, numerics, kernels, parallel), parallel.mesh, mesh)
    settings = draft_settings(config, model_config)
    if settings is not None:
        check_draft_tensors(folder, model_config)
        draft_model = abstract_draft(model_config, numerics, kernels, parallel)
        places |= parameter_shardings(draft_model, parallel.mesh, mesh, LEAF_PREFIX)
    weights_dir = config.cache.weights_dir
    leaves = load_or_convert(folder, model_config, weights_dir, places, parallel, draft=settings is not None)
    host_tables = open_host_tables(folder, model_config, parallel)
    own = {path: leaf for path, leaf in leaves.items() if not path.startswith(LEAF_PREFIX)}
    model = assemble(model_config, numerics, own, tables, kernels, parallel, host_tables)
    draft = None if settings is None else assemble_draft(model_config, numerics, leaves, kernels, parallel)
    layout = cache_layout(model_config, numerics.formats, 1, config.engine.max_num_seqs, settings)
    outputs = TOKENS if config.command != "score" else TRACE if config.score.trace else LOGITS
    drafting = None if draft is None or settings is None else (draft, settings)
    measure = partial(fullest_step, model, mesh, ladder, outputs, drafting, compiler)
    layout = size_caches(config, layout, mesh.local_devices, measure)
    thread = LaunchThread() if draft is not None and mesh.local_devices[0].platform == "gpu" else None
    runner = ModelRunner(model, layout, mesh, draft, settings, compiler, thread)
    return EngineParts(model_config, folder, tokenizer, runner, ladder, layout, config.eplb, config.drafting)


def draft_settings(config: Config, model_config: ModelConfig) -> DraftSettings | None:
    """How the config drafts; None where nothing is drafted. Raises ConfigError for a model that cannot."""
    group = config.drafting
    if not group.enabled:
        if config.speculative.enabled and config.engine.type == "prompt":
            logger.info("speculative.enabled: nothing is drafted, as engine.type = prompt ends with the first token")
        return None
    if not model_config.num_nextn_predict_layers:
        raise ConfigError(
            f"speculative.enabled: true, but the config.json of {config.model.path} announces no draft model "
            "(num_nextn_predict_layers is 0); set it to false or take a checkpoint with mtp.* tensors"
        )
    if group.num_draft_tokens > model_config.dspark_block_size:
        raise ConfigError(
            f"speculative.num_draft_tokens: {group.num_draft_tokens} is more than the {model_config.dspark_block_size} "
            f"drafts (dspark_block_size) of {config.model.path}; give at most as many"
        )
    experts, ep = model_config.dspark_n_routed_experts, config.mesh.ep
    if experts % ep:
        raise ConfigError(
            f"mesh.ep: {ep} does not divide the draft's experts, dspark_n_routed_experts = {experts}; give another "
            "mesh.ep, or set speculative.enabled to false"
        )
    return DraftSettings(group.num_draft_tokens, group.way, group.confidence_temperatures)


def check_draft_tensors(folder: Path, model_config: ModelConfig) -> None:
    """Raises ConfigError for a checkpoint without the draft that its config.json announces, and CheckpointError."""
    with open_checkpoint(folder, model_config) as reader:
        if not reader.has_draft:
            raise ConfigError(
                f"speculative.enabled: true, but {folder} holds no mtp.* tensors, the draft model that its config.json "
                "announces; set it to false or take a checkpoint with them"
            )


def cache_layout(
    model_config: ModelConfig, formats: CacheFormats, num_blocks: int, num_slots: int, settings: DraftSettings | None
) -> CacheLayout:
    """The caches of a model and, with `settings`, of its draft."""
    layout = CacheLayout(model_config, formats, num_blocks, num_slots)
    if settings is None:
        return layout
    return dataclasses.replace(
        layout,
        draft_stages=model_config.num_nextn_predict_layers,
        num_drafts=settings.num_drafts,
        keeps_proposal=settings.way == PROBABILISTIC,
    )


def build_parallel(config: Config, model_config: ModelConfig) -> Parallel:
    """How the model is spread over the config's mesh. Raises ConfigError for experts that do not divide by mesh.ep."""
    plan, experts, extra = config.mesh.plan, model_config.n_routed_experts, 0
    balanced = plan.ep > 1 and any(config.eplb.value(name) for name in ("extra_per_rank", "interval"))
    asked = config.eplb.preset != "none" or any(config.eplb.value(n) for n in ("extra_per_rank", "interval"))
    if asked and not balanced:
        logger.info("eplb: mesh.ep is 1, so there is nothing to balance")
    if balanced:
        extra = num_physical_slots(experts, plan.ep, config.eplb.value("extra_per_rank")) - experts
    plan.check_experts(experts, extra)
    if config.eplb.force != "none":
        try:
            forced_slot_factors(FORCED_RATIO, plan.ep, experts + extra, model_config.num_experts_per_tok)
        except ValueError as error:
            raise ConfigError(f"eplb.force: {config.eplb.force} does not fit this mesh: {error}") from error
    if plan.world > 1:
        logger.info("mesh of %d devices: %s", plan.world, ", ".join(f"{a} {n}" for a, n in plan.axis_sizes.items()))
    return Parallel(plan, extra, balanced, config.eplb.force, engram_placement=config.model.engram_placement)


def open_host_tables(folder: Path, model_config: ModelConfig, parallel: Parallel) -> HostTables | None:
    """The Engram tables of a checkpoint, when they are to stay on the host. Raises CheckpointError."""
    if parallel.engram_placement != "host" or not model_config.engram_layer_ids:
        return None
    with open_checkpoint(folder, model_config) as reader:
        tables = HostTables.of(reader)
    logger.info(
        "model.engram_placement host: Engram tables of %.1f MB are read from the checkpoint's files, %.1f MB less on "
        "each device; every step waits for its rows before its first layer: nothing overlaps with them yet",
        tables.nbytes / 1e6,
        tables.nbytes / parallel.mesh.size("engram_rows") / 1e6,
    )
    return tables


def parameter_shardings(
    model: nnx.Module, plan: DeviceMesh, mesh: jax.sharding.Mesh, prefix: str = ""
) -> dict[str, NamedSharding]:
    """Where each weight lives, by dotted path after `prefix`."""
    return {
        prefix + path: NamedSharding(mesh, plan.spec(leaf.get_metadata()["logical_axes"]))
        for path, leaf in parameter_paths(model).items()
    }


def build_ladder(config: Config, look_back: int = 3) -> BucketLadder:
    """The compiled shapes: `engine.*_buckets`, or ladders from the limits.

    look_back: tokens of the model's n-grams before their last. Raises ConfigError for prefill buckets that do
    not divide into tiles, or of which a larger one holds fewer chunks.
    """
    engine = config.engine
    cp, held = config.mesh.cp, 0
    for rows in engine.prefill_buckets or ():
        grain = Bucket(False, rows, 1, cp).grain
        if rows % grain:
            near = BucketLadder.derive(
                max_num_batched_tokens=rows, max_num_seqs=1, max_context_blocks=1, prefill=[rows], cp=cp
            ).prefill_rows[0]
            raise ConfigError(
                f"engine.prefill_buckets: {rows} is not a multiple of {grain} rows, its tiles"
                f"{f' in each of 2 x mesh.cp = {2 * cp} blocks' if cp > 1 else ''}; give {near}"
            )
        # What fits one bucket has to fit every larger one: ranks of one step share the largest that any needs.
        if rows // grain < held:
            raise ConfigError(
                f"engine.prefill_buckets: {rows} rows are {rows // grain} chunks of at least {grain}, fewer than the "
                f"{held} of the bucket before it; leave one of them out"
            )
        held = rows // grain
    # Several may come to the same number of blocks: one program for them.
    context = engine.context_buckets and sorted({-(-n // engine.block_size) for n in engine.context_buckets})
    return BucketLadder.derive(
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_context_blocks=blocks_per_sequence(engine),
        prefill=engine.prefill_buckets,
        decode=engine.decode_buckets,
        context=context,
        cp=config.mesh.cp,
        keep_tokens=engine.replay.keep_tokens if engine.replay.decoder == "compact" else None,
        history=look_back,
        drafts=config.drafting.num_draft_tokens if config.drafting.enabled else 0,
        varlen=config.drafting.varlen,
    )


def size_caches(
    config: Config, layout: CacheLayout, devices: Sequence[jax.Device], measure: Callable[[CacheLayout], StepMemory]
) -> CacheLayout:
    """`layout` with its number of blocks (`choose_blocks`), from what is free on `devices` now. Says what was decided.

    measure: the fullest step over caches of such a layout; not asked where devices share the machine's memory, which
    nobody reserves ahead. Raises ConfigError when not even one request fits, or fewer than `engine.num_blocks`.
    """
    engine = config.engine
    room = memory_room(devices, engine.memory_utilization)
    # The caches are arrays over all processes: the one with the least memory decides.
    own = np.array([-1, 0, 0] if room is None else [room.limit, room.used, room.shared], np.int64)
    everyones = processes.current().gather(own, "the memory of a device").tolist()
    rooms = [MemoryRoom(limit, used, bool(shared)) for limit, used, shared in everyones if limit >= 0]
    room = min(rooms, key=lambda room: room.free(engine.memory_utilization), default=None)
    step = None
    if room is not None and not room.shared:
        step = measure(dataclasses.replace(layout, num_blocks=blocks_per_sequence(engine)))
    blocks, why = choose_blocks(engine, layout, room, step)
    layout = dataclasses.replace(layout, num_blocks=blocks)
    logger.info("%s", describe(engine, layout, why))
    return layout


def fullest_step(
    model: Transformer,
    mesh: jax.sharding.Mesh,
    ladder: BucketLadder,
    outputs: str,
    drafting: tuple[DraftModel, DraftSettings] | None,
    compiler: Compiler,
    layout: CacheLayout,
) -> StepMemory:
    """What the step that needs the most memory needs; compiles the candidates, over caches that need not exist.

    outputs: what steps are asked for, as in `ModelRunner.execute`. drafting: None where nothing is drafted.
    """
    graph, params = nnx.split(model)
    draft = None if drafting is None else nnx.split(drafting[0])
    plan, buckets = model.parallel.mesh, ladder.buckets()
    shapes = [bucket for bucket in fullest_buckets(ladder) if outputs == TOKENS or not bucket.drops_rows]

    def compiled(bucket: Bucket) -> StepMemory:
        traced = trace_step(graph, params, mesh, plan, layout, bucket, outputs, draft)
        return step_memory(bucket, compiler(traced.lower()), len(buckets))

    trees: tuple[Any, Any] = (params, parameter_specs(params, plan))
    head, spec = (tree["head"]["weight"].get_value() for tree in trees)
    sampling = SamplingPrograms(mesh, plan, layout, head, spec)

    def drawing() -> StepMemory:
        sequences = max(bucket.sequences for bucket in buckets if not bucket.drafts)
        executable = compiler(sampling.lower("sample", sequences, model.numerics.dtype))
        return program_memory(f"drawing the tokens of {sequences} sequences", executable)

    logger.info("compiling the %d fullest steps to see what memory they need", len(shapes))
    jobs: list[Callable[[], StepMemory]] = [partial(compiled, bucket) for bucket in shapes]
    jobs += [drawing] if outputs == TOKENS else []
    if drafting is None or draft is None:
        return max(compile_together(jobs), key=lambda step: step.total)

    both = params, draft[1]
    specs = tuple(parameter_specs(tree, plan) for tree in both)
    graphs, dtype = (graph, draft[0]), model.numerics.dtype
    programs = SpeculativePrograms(mesh, plan, layout, drafting[1], graphs, specs, dtype)
    verify = next(bucket for bucket in shapes if bucket.drafts)

    def accepting(extra: bool) -> StepMemory:
        traced = programs.trace_accept(both, sampling.abstract_state, verify.requests, verify.rows, extra)
        count = len({(bucket.requests, bucket.rows) for bucket in buckets if bucket.drafts})
        name = f"accepting drafts of {verify.requests} sequences in {verify.rows} rows"
        return program_memory(name, compiler(traced.lower()), count)

    def proposing() -> StepMemory:
        executable = compiler(programs.trace_draft(both, verify.requests).lower())
        return program_memory(f"drafting for {verify.requests} sequences", executable, len(ladder.decode_rows))

    after: list[Callable[[], StepMemory]] = [partial(accepting, False), partial(accepting, True), proposing]
    found = compile_together([*jobs, *after])
    steps, last = found[: len(jobs)], found[len(jobs) :]
    at = shapes.index(verify)
    steps[at] = in_turn([steps[at], *last])
    return max(steps, key=lambda step: step.total)
