"""`plan`: what a config would need and move on devices that are not here (cli-contract, plan).

Traces and compiles the prefill step and the decode step, which with drafts is three programs, of the whole mesh from
shapes alone: no weights, no accelerator. Bytes come from the shapes, collectives and temporaries from the traced
program, rates from `platforms.accelerators`. Where the planned device's own compiler is installed, it compiles and its
temporaries count; else the CPU's compiles for simulated devices, which shows that the program is sound and nothing
about memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from di_jax.checkpoint.hub import DEMO, resolve_checkpoint
from di_jax.checkpoint.mapping import host_specs
from di_jax.commands.bench_slice.deployment import deployment
from di_jax.commands.plan_cost import draft_cost, total
from di_jax.commands.plan_tables import tables
from di_jax.commands.records import print_result
from di_jax.commands.roofline import Peaks, StepCost, step_cost
from di_jax.config import Config
from di_jax.engine.compiling import COMPILE_STACK_BYTES
from di_jax.engine.memory_sizing import blocks_per_sequence, draft_bytes
from di_jax.engine.runner import parameter_specs, trace_step
from di_jax.engine.setup import build_ladder, build_parallel, cache_layout, draft_settings
from di_jax.engine.speculative_programs import DraftSettings, SpeculativePrograms
from di_jax.engine.step_plan import Bucket
from di_jax.errors import ConfigError, UserError
from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.model.dspark import LEAF_PREFIX, DraftModel, abstract_draft
from di_jax.model.linear import Numerics
from di_jax.model.transformer import Transformer, abstract_model, parameter_paths
from di_jax.parallel.collectives import Collective, collectives, network_seconds
from di_jax.parallel.layout_picture import layout_svg
from di_jax.parallel.mesh import DeviceMesh
from di_jax.parallel.placement import PlacedArray, place, place_on_host, place_state, place_weights
from di_jax.parallel.storage import StoragePlan, StoreLoad, storage_plan, window_state_bytes
from di_jax.parallel.temporaries import temporary_bytes
from di_jax.platforms.accelerators import ACCELERATORS, Accelerator
from di_jax.platforms.devices import configure_jax, require_devices
from di_jax.platforms.topologies import compile_only_devices
from kernels_pallas.choice import KernelChoice
from kernels_pallas.hopper import KERNEL

logger = logging.getLogger(__name__)

PREFILL, DECODE = "prefill", "decode"
VERIFY, ACCEPT, DRAFT = "verify", "accept", "draft"  # programs of a decode step with drafts, in their order
# Facts of the released checkpoint that a plan needs of it, so that planning for it takes no download.
RELEASED = {"deepseek-ai/DeepSeek-V4.1-Flash": "deepseek-v4.1-flash.json"}
# For the compiler: code that nobody runs is not optimized, which saves a third of the time; memory is placed before.
NEVER_RUN = {"xla_backend_optimization_level": 0}
PROGRESS_S = 10.0  # between two signs of life of a compilation


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Least times of a step on one device; bound: the longest of the three."""

    compute_s: float
    memory_s: float
    network_s: float
    bound: str


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The plan of one step. Bytes and flops are of one device unless said."""

    devices: int
    axes: dict[str, int]
    weights_bytes: int
    kv_bytes_per_token: float  # paged caches
    state_bytes_per_sequence: float  # rings and the like
    temp_bytes: int
    temp_source: str  # device_compile or estimated
    peak_bytes_per_device: int  # weights, caches of engine.max_num_seqs at full length, step buffer, temporaries
    fits: bool  # in engine.memory_utilization of hbm_bytes
    hbm_bytes: int
    max_concurrent_at_max_len: int  # requests of engine.max_model_len on all devices together
    collectives: tuple[Collective, ...]
    flops_per_step: float
    roofline: Roofline
    compile_s: float


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """Everything that `plan --json` prints."""

    prefill: StepReport
    decode: StepReport
    layout: list[dict[str, Any]]
    storage: StoragePlan


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints the plan as tables, with --json also as one object; with --output draws the layout as SVG. Returns 0."""
    began = time.perf_counter()
    if config.bench.kind == "slice":  # a config of one rank: what is planned is the deployment
        config = deployment(config)
    model_config = released_config(config.model.path, config.model.revision)
    planner = Planner(config, model_config)
    output: Path | None = getattr(args, "output", None)
    if output is not None:
        planner.draw(output)
    report = planner.report()
    print_result(tables(report, planner.describe()))
    logger.info("planned in %.0f s", time.perf_counter() - began)
    if args.json:
        print_result(json.dumps(dataclasses.asdict(report)))
    return 0


def released_config(path: str, revision: str | None = None) -> ModelConfig:
    """The architecture that `model.path` names: a folder, a config.json, `demo`, or a hub id that is known here.

    Raises UserError for another hub id: a plan reads no network.
    """
    file = Path(path).expanduser()
    if path in RELEASED and not file.exists():
        file = Path(__file__).parent.parent / "model" / "released" / RELEASED[path]
        logger.info("model.path %s: planning with the config.json that comes with this package", path)
    elif path == DEMO:
        file = resolve_checkpoint(path, revision)
    elif not file.exists():
        raise ConfigError(
            f"model.path: {path!r} is neither a folder, a config.json nor a hub id whose config.json comes with this "
            f"package ({', '.join(RELEASED)}); download its config.json and name that"
        )
    else:
        logger.info("model.path %s: planning with its config.json", path)
    return ModelConfig.from_file(file)


class Planner:
    """The model, mesh and caches of a config, abstract. Raises ConfigError for sizes that do not fit together."""

    def __init__(self, config: Config, model_config: ModelConfig) -> None:
        self.config, self.model_config = config, model_config
        self.device: Accelerator = ACCELERATORS[config.plan.device]
        self.mesh_plan: DeviceMesh = config.mesh.plan
        self.parallel = build_parallel(config, model_config)
        ladder = build_ladder(config, model_config.engram_look_back)
        self.settings: DraftSettings | None = draft_settings(config, model_config)
        context, requests = ladder.context_blocks[-1], ladder.decode_rows[-1]
        verified = ladder.verify_rows(requests)[-1] if self.settings else requests
        self.buckets = {
            PREFILL: ladder.bucket(False, ladder.prefill_rows[-1], context),
            DECODE: ladder.bucket(True, verified, context, requests=requests if self.settings else 0),
        }
        self.programs = {PREFILL: (PREFILL,), DECODE: (VERIFY, ACCEPT, DRAFT) if self.settings else (DECODE,)}
        simulated = config.with_values({"mesh.simulate_devices": self.mesh_plan.world})
        configure_jax(simulated)
        here = require_devices(simulated)
        targets = here if self.device.name == "cpu" else compile_only_devices(self.device.name, self.mesh_plan.world)
        self.compiles_for_device = targets is not None
        self.mesh = self.mesh_plan.build(here if targets is None else targets)
        self.numerics = Numerics.create(
            config.model.dtype,
            quantize_caches=config.model.quantize_caches,
            quantize_activations=config.model.quantize_activations,
            wo_a_input=config.model.wo_a_input,
        )
        # A kernel is planned as what it computes: the machine that plans need not be able to run it.
        named = tuple((op, "reference" if name == KERNEL else name) for op, name in config.kernels.overrides)
        kernels = KernelChoice(config.kernels.implementation, named)
        self.model: Transformer = abstract_model(model_config, self.numerics, kernels, self.parallel)
        self.graph, self.params = nnx.split(self.model)
        self.draft: DraftModel | None = None
        if self.settings is not None:
            self.draft = abstract_draft(model_config, self.numerics, kernels, self.parallel)
        blocks = config.engine.num_blocks or blocks_per_sequence(config.engine) * config.engine.max_num_seqs
        formats, slots = self.numerics.formats, config.engine.max_num_seqs
        self.layout: CacheLayout = cache_layout(model_config, formats, blocks, slots, self.settings)
        self.on_host = host_specs(model_config, self.parallel)
        self.weights = place_weights(self.params, self.mesh_plan) + place_on_host(self.on_host)
        if self.draft is not None:
            drafts = place_weights(nnx.state(self.draft), self.mesh_plan)
            self.weights += [dataclasses.replace(array, name=LEAF_PREFIX + array.name) for array in drafts]
        self.state = place_state(self.layout, self.mesh_plan)

    def describe(self) -> list[str]:
        """What is planned, for a person."""
        engine, mesh = self.config.engine, self.mesh_plan
        experts = self.model_config.n_routed_experts
        buckets = ", ".join(
            f"{name} {bucket.rows} rows x {bucket.context_blocks} blocks" for name, bucket in self.buckets.items()
        )
        host_bytes = sum(spec.nbytes for spec in self.on_host.values())
        return [
            f"{self.config.model.path}, {self.config.model.dtype}, on {mesh.world} {self.device.name} devices: "
            f"dp {mesh.dp}, cp {mesh.cp}, ep {mesh.ep}; {experts} + {self.parallel.extra_experts} expert slots a layer",
            f"steps of a rank: {buckets}; {engine.max_num_seqs} requests of up to {engine.max_model_len} tokens",
            *(self._drafting() if self.settings else ()),
            *([f"Engram tables: {host_bytes / 1e9:,.2f} GB in the memory of each host"] if self.on_host else []),
        ]

    def _drafting(self) -> list[str]:
        """Of the draft model, for a person."""
        assert self.settings is not None
        weights = sum(array.bytes_per_device for array in self.weights if array.name.startswith(LEAF_PREFIX))
        windows, kept = draft_bytes(self.layout)
        return [
            f"drafts: {self.settings.num_drafts} a step, {self.settings.way}; a decode step is "
            f"{', '.join(self.programs[DECODE])}; weights of {weights / 1e9:,.2f} GB on a device, and of each request "
            f"{windows / 1e3:,.2f} kB of windows and {kept / 1e3:,.2f} kB of drafts"
        ]

    def draw(self, path: Path) -> None:
        """Writes the picture of the layout. Raises UserError when the file cannot be written."""
        svg = layout_svg(self.describe()[0], self.weights + self.state, self.mesh_plan, self.device.domain)
        try:
            path.write_text(svg, encoding="utf-8")
        except OSError as error:
            raise UserError(f"output {path}: cannot be written: {error.strerror}") from error
        logger.info("wrote the picture of the layout to %s", path)

    def report(self) -> PlanReport:
        """Traces and compiles both steps; minutes for the released model."""
        traced = {name: self.trace(name) for programs in self.programs.values() for name in programs}
        compiled = self.compile(traced)
        steps = {name: self.step_report(name, traced, compiled) for name in self.buckets}
        arrays = [*self.weights, *self.state, *(self.buffer(name) for name in self.buckets)]
        load = StoreLoad(**dataclasses.asdict(self.config.plan.storage))
        window = window_state_bytes(self.layout)
        storage = storage_plan(load, self.layout.bytes_per_token, window, self.mesh_plan.world)
        return PlanReport(steps[PREFILL], steps[DECODE], [array.record() for array in arrays], storage)

    def trace(self, name: str) -> Any:
        """A program of a step."""
        bucket = self.buckets[PREFILL if name == PREFILL else DECODE]
        logger.info("tracing the %s step: %d rows, %d context blocks", name, bucket.rows, bucket.context_blocks)
        draft = None if self.draft is None else nnx.split(self.draft)
        if name not in (ACCEPT, DRAFT):
            return trace_step(self.graph, self.params, self.mesh, self.mesh_plan, self.layout, bucket, draft=draft)
        assert draft is not None and self.settings is not None
        params = self.params, draft[1]
        programs = SpeculativePrograms(
            self.mesh,
            self.mesh_plan,
            self.layout,
            self.settings,
            (self.graph, draft[0]),
            (parameter_specs(params[0], self.mesh_plan), parameter_specs(params[1], self.mesh_plan)),
            self.numerics.dtype,
        )
        if name == DRAFT:
            return programs.trace_draft(params, bucket.requests)
        return programs.trace_accept(params, None, bucket.requests, bucket.rows)

    def compile(self, traced: dict[str, Any]) -> dict[str, tuple[Any, float]]:
        """The executables and the seconds that each took, all at once, with signs of life."""
        target = self.device.name if self.compiles_for_device else "simulated"
        logger.info("compiling %s for %d %s devices", " and ".join(traced), self.mesh_plan.world, target)
        options = NEVER_RUN if self.mesh.devices.flat[0].platform == "cpu" else None

        def timed(program: Any) -> tuple[Any, float]:
            began = time.perf_counter()
            executable = program.lower().compile(compiler_options=options)
            return executable, time.perf_counter() - began

        previous = threading.stack_size(COMPILE_STACK_BYTES)
        pool = ThreadPoolExecutor(len(traced))
        try:
            futures: dict[str, Future[tuple[Any, float]]] = {
                name: pool.submit(timed, program) for name, program in traced.items()
            }
            began, left = time.perf_counter(), set(futures.values())
            while left:
                done, left = wait(left, PROGRESS_S, "FIRST_COMPLETED")
                for name in (name for name, future in futures.items() if future in done):
                    logger.info("compiled the %s step in %.1f s", name, futures[name].result()[1])
                if left and not done:
                    logger.info("compiling, %.0f s", time.perf_counter() - began)
            return {name: future.result() for name, future in futures.items()}
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            problem = " ".join(str(error).splitlines()[0].split())
            raise UserError(
                f"plan.device: a step does not fit {self.device.name}, says its compiler ({problem}); give the mesh "
                "more devices, or lower engine.max_num_batched_tokens, engine.max_num_seqs or engine.max_model_len"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            threading.stack_size(previous)

    def step_report(
        self, name: str, traced: Mapping[str, Any], compiled: Mapping[str, tuple[Any, float]]
    ) -> StepReport:
        """The numbers of one step. traced, compiled: every program, with the seconds of its compilation."""
        engine, mesh, device = self.config.engine, self.mesh_plan, self.device
        measured, programs = self.compiles_for_device, self.programs[name]
        temp = self.waiting_bytes(name) + max(
            compiled[program][0].memory_analysis().temp_size_in_bytes
            if measured
            else temporary_bytes(traced[program].jaxpr.jaxpr)
            for program in programs
        )
        weights = sum(array.bytes_per_device for array in self.weights)
        fixed = weights + self.buffer(name).bytes_per_device + temp
        peak = fixed + sum(array.bytes_per_device for array in self.state)
        usable = int(device.hbm_bytes * engine.memory_utilization)
        request = blocks_per_sequence(engine) * engine.block_size * self.layout.bytes_per_token
        request += self.layout.bytes_per_slot
        # In a prefill the context ranks of a data-parallel rank all hold its requests; in decode each has its own.
        ranks = mesh.world if name == DECODE else mesh.dp
        moved = joined(collectives(traced[program].jaxpr.jaxpr, mesh.axis_sizes) for program in programs)
        cost = self.cost(name)
        peaks = Peaks(
            device.bytes_per_s,
            device.flops_per_s,
            device.quantized_flops_per_s if self.numerics.quantize_activations else None,
        )
        times = {
            "compute": cost.compute_seconds(peaks),
            "memory": cost.memory_seconds(peaks),
            "network": network_seconds(moved, mesh.axis_sizes, device),
        }
        return StepReport(
            devices=mesh.world,
            axes=dict(mesh.axis_sizes),
            weights_bytes=weights,
            kv_bytes_per_token=self.layout.bytes_per_token,
            state_bytes_per_sequence=self.layout.bytes_per_slot,
            temp_bytes=temp,
            temp_source="device_compile" if measured else "estimated",
            peak_bytes_per_device=peak,
            fits=peak <= usable,
            hbm_bytes=device.hbm_bytes,
            max_concurrent_at_max_len=max(0, int((usable - fixed) // request)) * ranks,
            collectives=moved,
            flops_per_step=cost.flops,
            roofline=Roofline(
                times["compute"], times["memory"], times["network"], max(times, key=lambda bound: times[bound])
            ),
            compile_s=round(sum(compiled[program][1] for program in programs), 3),
        )

    def waiting_bytes(self, name: str) -> int:
        """Of the hidden rows that wait for another program of the step."""
        bucket = self.buckets[name]
        return bucket.rows * self.model_config.hidden_size * self.numerics.dtype.itemsize if bucket.drafts else 0

    def cost(self, name: str) -> StepCost:
        """What a full step must read and multiply on one device: a decode step of requests at `engine.max_model_len`,
        or a prefill step of the beginning of one prompt."""
        bucket, limit = self.buckets[name], self.config.engine.max_model_len
        leaves = {path: leaf.get_value() for path, leaf in parameter_paths(self.model).items()}
        if bucket.decode:
            tokens, sequences, context = bucket.rows, bucket.sequences, float(limit)
        else:
            tokens, sequences, context = bucket.rows // bucket.cp, 1, min(bucket.rows, limit) / 2
        cost = step_cost(leaves, self.layout, tokens=tokens, sequences=sequences, context=context, mesh=self.mesh_plan)
        if self.draft is None:
            return cost
        drafts = {path: leaf.get_value() for path, leaf in parameter_paths(self.draft).items()}
        return total(cost, draft_cost(bucket, self.layout, leaves, drafts, tokens, context, self.mesh_plan))

    def buffer(self, name: str) -> PlacedArray:
        """The packed plan that the host sends to a step, a row for each rank."""
        bucket: Bucket = self.buckets[name]
        array = jax.ShapeDtypeStruct((self.mesh_plan.world, bucket.size), jax.numpy.int32)
        return place(f"buffer.{name}", array, ("blocks", None), self.mesh_plan)


def joined(programs: Iterable[tuple[Collective, ...]]) -> tuple[Collective, ...]:
    """The collectives of a step of several programs, the most bytes first."""
    calls: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    for program in programs:
        for call in program:
            calls[call.op, call.axes, call.bytes] += call.per_step
    found = [Collective(op, axes, nbytes, count) for (op, axes, nbytes), count in calls.items()]
    return tuple(sorted(found, key=lambda call: (-call.bytes * call.per_step, call)))
