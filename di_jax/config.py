"""The config: one frozen tree of dataclasses, read from a YAML file and `--set` assignments.

Every key is a field here with its type, default and allowed values, so that this file is the reference of what can
be set; how they are checked is config_schema.py. A `Config` that exists is valid: `dataclasses.replace` checks too.
A key whose feature does not exist yet is declared with `only=(off value,)`; landing the feature deletes that.

Nothing here imports jax: a wrong key is reported before the seconds that importing it costs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from di_jax.config_schema import Group, assigned, check_ascending, dump_yaml, key, known, parse_yaml, show
from di_jax.errors import ConfigError
from di_jax.parallel.mesh import DeviceMesh
from di_jax.platforms.accelerators import ACCELERATORS

COMMANDS = ("generate", "serve", "score", "bench", "plan", "eval", "conformance")


@dataclass(frozen=True)
class ModelGroup(Group):
    PATH: ClassVar[str] = "model"
    path: str = "demo"  # a local folder, a hub id, or `demo`, the bundled checkpoint
    revision: str | None = None  # branch, tag or commit of a hub id
    dtype: str = key("bfloat16", choices=("float32", "bfloat16"))
    quantize_caches: bool = True  # the window, compressed and index-key quantizers are part of the function
    quantize_activations: bool | str = key("auto", choices=("auto", True, False))  # auto: on for bfloat16
    wo_a_input: str | None = key(None, choices=(None, "quantized", "bf16"))  # null: as the activations
    engram_placement: str = key("device", choices=("device", "host"))  # host: read from the checkpoint's files


@dataclass(frozen=True)
class MeshGroup(Group):
    PATH: ClassVar[str] = "mesh"
    dp: int = key(1, low=1)  # data parallel ranks: each works on its own requests and pages
    cp: int = key(1, low=1)  # context parallel ranks: they share the prompt of one request
    ep: int = key(1, low=1)  # ranks that share the routed experts; reuses the ranks of dp and cp
    simulate_devices: int = key(0, low=0)  # virtual CPU devices of this process; 0: the real ones
    rules: dict | None = None  # logical name: list of the axes d0, d1, c0, c1; null: the defaults

    @property
    def world(self) -> int:
        """Devices that the mesh needs."""
        return self.dp * self.cp

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, axes in (self.rules or {}).items():
            if not isinstance(axes, list | tuple) or not all(isinstance(axis, str) for axis in axes):
                raise ConfigError(f"mesh.rules.{name}: {show(axes)} is not a list of mesh axes")
        _ = self.plan  # sizes and rules are checked there

    @property
    def plan(self) -> DeviceMesh:
        """The mesh that this group describes."""
        rules = tuple((name, tuple(axes)) for name, axes in (self.rules or {}).items())
        return DeviceMesh(self.dp, self.cp, self.ep, rules)


@dataclass(frozen=True)
class DistributedGroup(Group):
    PATH: ClassVar[str] = "distributed"
    coordinator: str | None = None  # HOST:PORT of process 0, where it listens; null: from the launcher
    num_processes: int | None = key(None, low=1)  # null: from the launcher, one without; 1: alone, whatever it says
    process_id: int | None = key(None, low=0)  # from 0; null: from the launcher
    timeout_s: float = key(1800.0, above=0)  # the longest that living processes may keep others waiting

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coordinator is not None and not self.coordinator.rpartition(":")[2].isdigit():
            raise ConfigError(f"distributed.coordinator: {show(self.coordinator)} is not HOST:PORT")
        if None not in (self.num_processes, self.process_id) and self.process_id >= self.num_processes:  # type: ignore[operator]
            raise ConfigError(
                f"distributed.process_id: {self.process_id} is not one of distributed.num_processes = "
                f"{self.num_processes}, counted from 0"
            )


@dataclass(frozen=True)
class PlatformGroup(Group):
    PATH: ClassVar[str] = "platform"
    name: str | None = key(None, choices=(None, "auto", "cpu", "gpu", "tpu"))  # null and auto: what jax finds
    pjrt_plugin: str | None = key(None, only=(None,))
    # Options of XLA for the engine's programs, over those known to be good on the device; null: XLA's defaults alone.
    compiler_options: str | Mapping[str, str | bool | int | float] | None = key("auto")
    # Of device memory on NVIDIA, by XLA's names. auto: vmm for an engine that drafts, whose graphs then stay.
    allocator: str = key("auto", choices=("auto", "default", "bfc", "cuda_async", "vmm"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.compiler_options, str) and self.compiler_options != "auto":
            raise ConfigError(
                f"platform.compiler_options: {show(self.compiler_options)} is not known; expected auto, null, or a "
                "mapping of options, such as {xla_gpu_enable_triton_gemm: false}"
            )


@dataclass(frozen=True)
class ReplayGroup(Group):
    PATH: ClassVar[str] = "engine.replay"
    # Decoder layers of a prompt's tokens before the last keep_tokens: off computes them, compact leaves them out, mask
    # computes and hides them, which gives the answers of compact.
    decoder: str = key("compact", choices=("off", "mask", "compact"), booleans={False: "off"})
    # After a prefix hit without window state: on computes the last 128 tokens of it again, off shortens the hit.
    encoder: str = key("on", choices=("off", "on"), booleans={False: "off", True: "on"})
    keep_tokens: int = key(140, low=1)  # at least the model's window + 6


def _check_buckets(dotted: str, buckets: tuple[int, ...] | None, limit_name: str, limit: int) -> None:
    """A ladder of bucket sizes must ascend and hold the largest step. Raises ConfigError."""
    if buckets is None:
        return
    check_ascending(dotted, buckets)
    if buckets[-1] < limit:
        raise ConfigError(f"{dotted}: the last bucket {buckets[-1]} is less than {limit_name} = {limit}")


@dataclass(frozen=True)
class EngineGroup(Group):
    """Counts of sequences, tokens and blocks are per data-parallel rank."""

    PATH: ClassVar[str] = "engine"
    # prompt: every request ends with its first token; completion: answers go before prompts.
    type: str = key("normal", choices=("normal", "prompt", "completion"))
    policy: str = key("default", choices=("default", "deepinfer"))  # deepinfer: the released system's vote
    max_num_seqs: int = key(16, low=1)  # requests running at once
    max_num_batched_tokens: int = key(2048, low=1)  # tokens of one prefill step
    max_sum_context: int | None = key(None, low=1)  # whole lengths of the prompts of one prefill step, summed
    max_model_len: int = key(4096, low=1)  # prompt and answer of one request, in tokens
    block_size: int = key(128, only=(128,))  # tokens of one block of the paged caches
    num_blocks: int | None = key(None, low=1)  # blocks of the pool; null: sized by the engine
    memory_utilization: float = key(0.9, above=0, high=1)  # share of device memory for weights, caches and temporaries
    prefill_buckets: tuple[int, ...] | None = key(None, low=1)  # padded tokens of a prefill step; null: a ladder
    decode_buckets: tuple[int, ...] | None = key(None, low=1)  # padded requests of a decode step; null: a ladder
    context_buckets: tuple[int, ...] | None = key(None, low=1)  # padded context tokens of a request; null: a ladder
    warmup: bool = True  # compile every bucket before the first request
    async_scheduling: bool = True  # launch the next step before the tokens of the last one are known
    prefix_caching: bool = True  # prompts that begin like an earlier one, or go on from it, use its caches
    replay: ReplayGroup = ReplayGroup()
    batch_invariant: bool = key(False, only=(False,))
    watermark: float = key(0.9, above=0, high=1)  # share of the blocks in use above which no prompt is begun
    max_waiting: int | None = key(None, low=1)  # sequences that may wait; null: any number
    deadline_s: float | None = key(None, above=0)  # of requests that name none; null: none
    ttft_target_ms: float | None = key(None, above=0)  # prompts give way to answers until this nears; null: never
    itl_target_ms: float | None = key(None, above=0)  # answers wait no longer for prompts, or for one step; null: four
    state_cache_bytes: int = key(2**30, low=0)  # host memory for window state at block boundaries of prefixes
    log_interval: int = key(10, low=0)  # seconds between two status lines; 0: none

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens = self.max_num_batched_tokens
        if tokens < self.block_size:
            raise ConfigError(
                f"engine.max_num_batched_tokens: {tokens} is less than engine.block_size = {self.block_size}"
            )
        if tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_num_batched_tokens: {tokens} is less than engine.max_num_seqs = {self.max_num_seqs}; "
                "a step must hold one token of every running request"
            )
        if self.num_blocks is not None and self.num_blocks * self.block_size < self.max_model_len:
            held = f"{self.num_blocks} x {self.block_size} = {self.num_blocks * self.block_size} tokens"
            needed = -(-self.max_model_len // self.block_size)
            raise ConfigError(
                f"engine.num_blocks: {held} cannot hold one request of engine.max_model_len = {self.max_model_len}; "
                f"give at least {needed}"
            )
        if self.policy == "deepinfer" and self.type != "normal":
            raise ConfigError(f"engine.policy: deepinfer has no vote for engine.type = {self.type}; use default")
        if self.policy != "default" and (self.ttft_target_ms or self.itl_target_ms):
            raise ConfigError(f"engine.policy: {self.policy} knows no engine.ttft_target_ms and engine.itl_target_ms")
        for name, limit in (
            ("prefill_buckets", "max_num_batched_tokens"),
            ("decode_buckets", "max_num_seqs"),
            ("context_buckets", "max_model_len"),
        ):
            _check_buckets(f"engine.{name}", getattr(self, name), f"engine.{limit}", getattr(self, limit))


@dataclass(frozen=True)
class SpeculativeGroup(Group):
    """Tokens that the checkpoint's draft model proposes and a decode step verifies, several at once (DSpark)."""

    PATH: ClassVar[str] = "speculative"
    enabled: bool = False
    num_draft_tokens: int = key(5, low=1)  # of a sequence and step, at most the checkpoint's dspark_block_size
    varlen: bool = True  # verifies as many of them as pay for their rows, the likeliest first; false: all, always
    coupled: bool = False  # seeded answers are the same whatever is drafted or verified, and fewer drafts are accepted
    draft_sampling: str = key("probabilistic", choices=("probabilistic", "one_hot"))  # one_hot: always the likeliest id
    # Drafts are drawn behind the min-p, top-k and top-p of their request, as its tokens are; false: temperature alone.
    draft_filters: bool = True
    # Of the calibration, one for each of num_draft_tokens, from scripts/fit_sts.py; null: 1 for all.
    confidence_temperatures: tuple[float, ...] | None = key(None, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        given, wanted = self.confidence_temperatures, self.num_draft_tokens
        if given is not None and len(given) != wanted:
            raise ConfigError(
                f"speculative.confidence_temperatures: {show(given)} are {len(given)} temperatures; give one for each "
                f"of speculative.num_draft_tokens = {wanted}, or null"
            )
        if self.coupled and self.draft_sampling != "probabilistic":
            raise ConfigError(
                f"speculative.draft_sampling: {self.draft_sampling} is not how speculative.coupled drafts: draft and "
                "target draw with the same noise; leave one of the two out"
            )

    @property
    def way(self) -> str:
        """How drafts are drawn and accepted: one of the ways of `engine.acceptance`."""
        return "coupled" if self.coupled else self.draft_sampling


# What the presets of eplb.preset set (engine 7.1): redundant slots per rank, steps of the window, steps between two
# rearrangements.
EPLB_PRESETS: Mapping[str, Mapping[str, int]] = {
    "none": {"extra_per_rank": 0, "window": 0, "interval": 0},
    "prefill": {"extra_per_rank": 4, "window": 100, "interval": 1_000},
    "decode": {"extra_per_rank": 1, "window": 1_000, "interval": 10_000},
}


@dataclass(frozen=True)
class EplbGroup(Group):
    """Expert-parallel load balancing. A key that is null takes the preset's value."""

    PATH: ClassVar[str] = "eplb"
    preset: str = key("none", choices=tuple(EPLB_PRESETS))
    extra_per_rank: int | None = key(None, low=0)  # redundant expert slots of each expert rank
    window: int | None = key(None, low=0)  # steps whose expert load the next rearrangement looks at
    interval: int | None = key(None, low=0)  # steps between two rearrangements; 0: never
    force: str = key("none", choices=("none", "balanced", "imbalanced"))  # routes by lot, for measurements

    def __post_init__(self) -> None:
        super().__post_init__()
        window, interval = self.value("window"), self.value("interval")
        if interval and not 0 < window <= interval:
            raise ConfigError(f"eplb.window: {window} must be at least 1 and at most eplb.interval = {interval}")

    def value(self, name: str) -> int:
        """extra_per_rank, window or interval: as set, else the preset's."""
        own: int | None = getattr(self, name)
        return EPLB_PRESETS[self.preset][name] if own is None else own


@dataclass(frozen=True)
class StructuredGroup(Group):
    PATH: ClassVar[str] = "structured"
    workers: int = key(0, only=(0,))
    timeout_s: float | None = key(None, only=(None,))
    max_schema_bytes: int | None = key(None, only=(None,))
    cache_bytes: int = key(0, only=(0,))


@dataclass(frozen=True)
class CacheGroup(Group):
    PATH: ClassVar[str] = "cache"
    compile_dir: str | None = None  # folder of compiled steps; null: none is kept
    weights_dir: str | None = None  # folder of converted checkpoints; null: none is kept


@dataclass(frozen=True)
class KernelOps(Group):
    """An implementation for one operation; null follows `kernels.implementation`."""

    PATH: ClassVar[str] = "kernels.ops"
    hyper_connections: str | None = key(None, choices=(None, "auto", "reference", "mosaic_gpu_sm90"))
    index_topk: str | None = key(None, choices=(None, "auto", "reference", "mosaic_gpu_sm90"))
    sparse_attention: str | None = key(None, choices=(None, "auto", "reference", "mosaic_gpu_sm90"))
    compress_store: str | None = key(None, choices=(None, "auto", "reference", "mosaic_gpu_sm90"))
    expert_ffn: str | None = key(None, choices=(None, "auto", "reference", "dense"))


@dataclass(frozen=True)
class KernelsGroup(Group):
    PATH: ClassVar[str] = "kernels"
    implementation: str = key("auto", choices=("auto", "reference"))  # auto may choose, a named one must run
    ops: KernelOps = KernelOps()

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """The operations with an implementation of their own: (operation, implementation) pairs."""
        named = dataclasses.asdict(self.ops)
        return tuple((op, implementation) for op, implementation in named.items() if implementation is not None)


def _checked_bias(bias: Mapping[Any, Any] | None) -> dict[int, float] | None:
    """By token id, from ids as numbers or, as JSON has them, as text. Raises ConfigError."""
    checked: dict[int, float] = {}
    for token, value in (bias or {}).items():
        plain = type(token) is int or (isinstance(token, str) and token.isascii() and token.isdigit())
        if not plain or int(token) < 0:
            raise ConfigError(f"sampling.logit_bias: {show(token)} is not a token id")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise ConfigError(f"sampling.logit_bias.{token}: {show(value)} is not a number from -100 to 100")
        checked[int(token)] = float(value)
    return None if bias is None else checked


@dataclass(frozen=True)
class SamplingGroup(Group):
    """Defaults of a request's `sampling`."""

    PATH: ClassVar[str] = "sampling"
    temperature: float = key(1.0, low=0)  # 0: greedy
    top_p: float = key(1.0, above=0, high=1)  # 1: off
    top_k: int = key(0, low=-1, high=2**31 - 1)  # 0 and -1: off
    min_p: float = key(0.0, low=0, high=1)  # 0: off
    max_tokens: int = key(16, low=1)
    min_tokens: int = key(0, low=0, high=2**31 - 1)  # before so many nothing ends an answer; at most max_tokens
    seq_seed: int | None = None  # null: drawn anew for every request
    stop: tuple[str, ...] | None = None  # texts that end an answer
    stop_token_ids: tuple[int, ...] | None = key(None, low=0)
    ignore_eos: bool = False
    logprobs: int | None = key(None, low=0, high=20)  # likeliest ids told beside each token, under the raw logits
    prompt_logprobs: int | None = key(None, only=(None,))
    n: int = key(1, only=(1,))
    presence_penalty: float = key(0.0, low=-2, high=2)
    frequency_penalty: float = key(0.0, low=-2, high=2)
    repetition_penalty: float = key(1.0, above=0)  # 1: off
    logit_bias: Mapping[str, Any] | None = None  # by token id: -100 to 100, added to its logit
    bad_words: tuple[str, ...] | None = None  # texts that answers must not hold, word by word as they are tokenized
    priority: int = 0  # lower goes first; 30 s of waiting count as one
    so_args: Mapping[str, Any] | None = key(None, only=(None,))
    forced_token_ids: tuple[int, ...] | None = key(None, only=(None,))
    deadline_s: float | None = key(None, above=0)  # from arrival to the end of the answer
    cache_salt: str | None = None  # prefixes are shared between requests of one salt only

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"sampling.min_tokens: {self.min_tokens} is more than sampling.max_tokens = {self.max_tokens}"
            )
        if not all(word for word in self.bad_words or ()):
            raise ConfigError(f"sampling.bad_words: {show(self.bad_words)} holds an empty text")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))


@dataclass(frozen=True)
class ServerGroup(Group):
    PATH: ClassVar[str] = "server"
    host: str = key("127.0.0.1", only=("127.0.0.1",))
    port: int = key(8000, only=(8000,))
    api_keys: tuple[str, ...] | None = key(None, only=(None,))
    admin_api_keys: tuple[str, ...] | None = key(None, only=(None,))
    grace_s: float = key(60.0, only=(60.0,))
    max_body_bytes: int = key(33554432, only=(33554432,))


@dataclass(frozen=True)
class GenerateGroup(Group):
    """What `generate` answers when neither --input nor --prompt is given."""

    PATH: ClassVar[str] = "generate"
    prompts: tuple[str, ...] | None = None
    input: str | None = None  # a .jsonl file of request records

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts is not None and self.input is not None:
            raise ConfigError(f"generate.input: {self.input!r} and generate.prompts are both set; keep one")


@dataclass(frozen=True)
class ScoreGroup(Group):
    PATH: ClassVar[str] = "score"
    feed: str = key("whole", choices=("whole", "chunked", "stepwise"))
    chunk: int = key(64, low=1)  # tokens of one piece of the chunked feed
    trace: bool = False  # also store streams, selections and experts of every layer


@dataclass(frozen=True)
class SliceGroup(Group):
    """One device as one rank of a deployment of `ep` expert ranks, with random weights; sizes are those of a rank."""

    PATH: ClassVar[str] = "bench.slice"
    ep: int = key(64, choices=(64, 8, 4))  # ranks that share the experts; with 1, 1 and 8 redundant slots on each
    phase: str = key("both", choices=("both", "decode", "prefill"))  # decode: steps of bench.batch_sizes requests
    prefill_rows: tuple[int, ...] = key((4096, 8192, 16384, 32768, 65536), low=1)  # of a prompt's last chunk
    accept_rate: float = key(0.75, low=0, high=1)  # drafts that are kept, in the tokens/s told: no model is there
    parts: bool = True  # time the parts of a step alone too
    label: str | None = None  # names the kernels in the history of results; null: XLA without any, else auto

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ascending("bench.slice.prefill_rows", self.prefill_rows)


@dataclass(frozen=True)
class BenchGroup(Group):
    PATH: ClassVar[str] = "bench"
    # host: the host's part of a step, over no device; slice: one device as one rank of many (bench.slice).
    kind: str = key("engine", choices=("engine", "host", "slice"))
    batch_sizes: tuple[int, ...] = key((1, 16), low=1)
    prompt_len: int = key(128, low=1)  # tokens
    output_len: int = key(32, low=1)  # tokens
    repeats: int = key(3, low=1)  # timed runs of each row; of kind slice, timed steps
    # Of kind host with drafts: an .npz of confidences that a draft model had, such as
    # scripts/results/demo-confidences.npz, with which what drafting gains is simulated; null: it is not.
    recording: str | None = None
    slice: SliceGroup = SliceGroup()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ascending("bench.batch_sizes", self.batch_sizes)
        if self.recording is not None and self.kind != "host":
            raise ConfigError(f"bench.recording: {show(self.recording)} is for bench.kind = host, not {self.kind}")


@dataclass(frozen=True)
class StorageGroup(Group):
    PATH: ClassVar[str] = "plan.storage"
    new_tokens_per_second: float = key(5000.0, low=0)  # prompt and answer tokens that enter the store, of the mesh
    retention_days: float = key(3.0, above=0)
    data_shards: int = key(10, low=1)  # erasure coding: shards of data and of parity
    parity_shards: int = key(2, low=0)
    server_bytes: float = key(246.3e12, above=0)  # raw capacity of one storage server
    fill: float = key(0.8, above=0, high=1)  # share of it that is used


@dataclass(frozen=True)
class PlanGroup(Group):
    PATH: ClassVar[str] = "plan"
    device: str = key("h200", choices=tuple(ACCELERATORS))
    storage: StorageGroup = StorageGroup()


@dataclass(frozen=True)
class EvalGroup(Group):
    PATH: ClassVar[str] = "eval"
    tasks: tuple[str, ...] | None = None  # names out of `files`; null: all of them
    n: int = key(1, low=1, high=1024)  # samples of each item; Pass@1 is their mean
    judge: str = key("rule", choices=("rule", "endpoint"))  # the rule that an item names, or a model that is asked
    files: dict | None = None  # type: ignore[type-arg]  # task name: .jsonl file of its items
    judge_url: str | None = None  # an OpenAI-compatible server, up to and with its /v1
    judge_model: str | None = None  # the model's name there
    judge_key_file: str | None = None  # a file whose first line is the key; null: none is sent

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, path in (self.files or {}).items():
            if not isinstance(name, str) or not isinstance(path, str):
                raise ConfigError(f"eval.files: {name!r}: {path!r} is not a task's name and the path of its file")
        if self.tasks is not None and (not self.tasks or len(set(self.tasks)) < len(self.tasks)):
            raise ConfigError(f"eval.tasks: {show(self.tasks)} is not a list of one or more different names")
        if self.judge == "endpoint":
            for name in ("judge_url", "judge_model"):
                if not getattr(self, name):
                    raise ConfigError(f"eval.{name}: is not set; eval.judge = endpoint needs it")


@dataclass(frozen=True)
class Config(Group):
    """The whole tree. `Config()` is the default of every key; `Config.from_dict` and `load_config` read one."""

    command: str = key("generate", choices=COMMANDS)
    model: ModelGroup = ModelGroup()
    mesh: MeshGroup = MeshGroup()
    distributed: DistributedGroup = DistributedGroup()
    platform: PlatformGroup = PlatformGroup()
    engine: EngineGroup = EngineGroup()
    speculative: SpeculativeGroup = SpeculativeGroup()
    eplb: EplbGroup = EplbGroup()
    structured: StructuredGroup = StructuredGroup()
    cache: CacheGroup = CacheGroup()
    kernels: KernelsGroup = KernelsGroup()
    sampling: SamplingGroup = SamplingGroup()
    server: ServerGroup = ServerGroup()
    generate: GenerateGroup = GenerateGroup()
    score: ScoreGroup = ScoreGroup()
    bench: BenchGroup = BenchGroup()
    plan: PlanGroup = PlanGroup()
    eval: EvalGroup = EvalGroup()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_simulated()
        if self.command != "bench":
            return
        length, limit = self.bench.prompt_len + self.bench.output_len, self.engine.max_model_len
        if length > limit:
            lengths = f"{self.bench.prompt_len} + {self.bench.output_len} = {length}"
            raise ConfigError(f"bench.prompt_len + bench.output_len: {lengths} exceed engine.max_model_len = {limit}")
        rows, limit = max(self.bench.batch_sizes), self.engine.max_num_seqs
        if rows > limit:
            raise ConfigError(f"bench.batch_sizes: {rows} requests at once exceed engine.max_num_seqs = {limit}")
        if self.bench.recording is not None and not self.speculative.enabled:
            raise ConfigError(f"bench.recording: {show(self.bench.recording)} needs speculative.enabled = true")

    def _check_simulated(self) -> None:
        """Raises ConfigError for fewer simulated devices, of all processes together, than the mesh has ranks."""
        mesh, processes = self.mesh, self.distributed.num_processes or 1
        if 0 < mesh.simulate_devices * processes < mesh.world:
            each = f" in each of distributed.num_processes = {processes}" if processes > 1 else ""
            raise ConfigError(
                f"mesh.simulate_devices: {mesh.simulate_devices}{each} is less than mesh.dp x mesh.cp = {mesh.dp} x "
                f"{mesh.cp} = {mesh.world}"
            )

    @property
    def drafting(self) -> SpeculativeGroup:
        """`speculative` as this run needs it: off in `score`, which computes every row of given tokens, and where every
        request ends with its first token."""
        idle = self.command == "score" or self.engine.type == "prompt"
        return dataclasses.replace(self.speculative, enabled=False) if idle else self.speculative

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """This config with some keys changed, by dotted name: `config.with_values({"engine.max_num_seqs": 4})`."""
        raw: Mapping[str, Any] = self.to_dict()
        for name, value in values.items():
            raw = assigned(Config, raw, name, value)
        return Config.from_dict(raw)

    def to_dict(self) -> dict[str, Any]:
        """The resolved tree as plain YAML data: dicts, lists, text, numbers, booleans, None."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    def to_yaml(self) -> str:
        """The resolved tree as YAML text that `load_config` reads back to an equal config."""
        return dump_yaml(self.to_dict())

    def digest(self, *groups: str) -> str:
        """SHA-256, in hex, of the resolved tree or of the named groups only: a key for caches."""
        plain = self.to_dict()
        picked = {name: plain[name] for name in groups if known(Config, name)} if groups else plain
        return hashlib.sha256(json.dumps(picked, sort_keys=True).encode()).hexdigest()


def load_config(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a config file, given by path or by the bare name of a packaged one, and applies `a.b=value` overrides.

    The values of overrides are YAML. Raises ConfigError, naming the key, the value and what is expected.
    """
    path = find_config(path_or_name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: cannot be read: {error}") from error
    raw = parse_yaml(text, f"config {path}")
    raw = {} if raw is None else raw
    if not isinstance(raw, Mapping):
        raise ConfigError(f"config {path}: {show(raw)} is not a mapping of groups")
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {override}: expected dotted.key=value")
        raw = assigned(Config, raw, name.strip(), parse_yaml(value, f"--set {override}"))
    return Config.from_dict(raw)


def find_config(path_or_name: str | Path) -> Path:
    """The file that `--config` means: an existing path, else a packaged config by its name with or without .yaml."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    # In a wheel the configs lie inside the package, in a checkout beside it.
    inside = Path(__file__).resolve().parent / "configs"
    folder = inside if inside.is_dir() else inside.parent.parent / "configs"
    packaged = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    name = str(path_or_name).removesuffix(".yaml")
    if name in packaged:
        return packaged[name]
    raise ConfigError(f"config {str(path_or_name)!r}: no such file; packaged configs: {', '.join(packaged)}")
