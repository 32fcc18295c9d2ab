"""The config tree: names of the contract, every refusal, YAML 1.1 pitfalls, look-up by bare name, round trips."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from di_jax.config import Config, find_config, load_config
from di_jax.config_schema import Group, known_keys
from di_jax.errors import ConfigError, UserError

# Every name that the command-line contract lists.
CONTRACT = """
    command
    model.{path,revision,dtype,quantize_caches,quantize_activations,wo_a_input,engram_placement}
    mesh.{dp,cp,ep,simulate_devices,rules} distributed.{coordinator,num_processes,process_id}
    platform.{name,pjrt_plugin}
    engine.{type,policy,max_num_seqs,max_num_batched_tokens,max_sum_context,max_model_len,block_size}
    engine.{memory_utilization,async_scheduling,prefix_caching,batch_invariant,watermark,max_waiting,deadline_s}
    engine.{ttft_target_ms,itl_target_ms,state_cache_bytes,log_interval} engine.replay.{decoder,encoder,keep_tokens}
    speculative.{enabled,num_draft_tokens,varlen,coupled,draft_sampling,confidence_temperatures}
    eplb.{preset,window,interval,extra_per_rank,force} structured.{workers,timeout_s,max_schema_bytes,cache_bytes}
    cache.{compile_dir,weights_dir} kernels.{implementation}
    kernels.ops.{hyper_connections,index_topk,sparse_attention,compress_store,expert_ffn}
    sampling.{temperature,top_p,top_k,min_p,max_tokens,min_tokens,seq_seed,stop,stop_token_ids,ignore_eos,logprobs}
    sampling.{prompt_logprobs,n,presence_penalty,frequency_penalty,repetition_penalty,logit_bias,bad_words,priority}
    sampling.{so_args,forced_token_ids,deadline_s,cache_salt}
    server.{host,port,api_keys,admin_api_keys,grace_s,max_body_bytes} score.{feed,chunk,trace} bench.{kind}
    plan.{device} eval.{tasks,n,judge,files,judge_url,judge_model,judge_key_file}
"""


def contract_names() -> Iterator[str]:
    for item in CONTRACT.split():
        group, brace, names = item.partition("{")
        yield from (group + name for name in names.rstrip("}").split(",")) if brace else (item,)


def fields(group: type[Group] = Config) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every key below a group: dotted name and field."""
    for field in dataclasses.fields(group):
        if isinstance(field.default, Group):
            yield from fields(type(field.default))
        else:
            yield group.dotted(field.name), field


def nested(dotted: str, value: Any) -> dict[str, Any]:
    for name in reversed(dotted.split(".")):
        value = {name: value}
    return value


def value_of(config: Config, dotted: str) -> Any:
    node: Any = config
    for name in dotted.split("."):
        node = getattr(node, name)
    return node


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_config(text: str) -> Path:
        path = tmp_path / "some.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_config


def test_every_listed_name_exists() -> None:
    assert set(contract_names()) <= set(known_keys(Config))


def test_importing_the_config_imports_no_jax() -> None:
    code = "import sys, di_jax.config, di_jax.run; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Refusals ----------------------------------------------------------------------------------------------------------

OFF_ONLY = {name: field.metadata["only"] for name, field in fields() if field.metadata.get("only")}


def other_values(allowed: tuple[Any, ...]) -> list[Any]:
    """Values near the allowed ones, none of them allowed."""
    if isinstance(allowed[0], bool):
        return [not allowed[0]]
    if isinstance(allowed[0], int):
        return [max(allowed) + 1]
    if isinstance(allowed[0], float):
        return [allowed[0] + 0.5]
    return ["anything"]


@pytest.mark.parametrize("name", OFF_ONLY)
def test_a_key_without_its_feature_takes_only_its_off_value(name: str) -> None:
    allowed = OFF_ONLY[name]
    assert value_of(Config(), name) == allowed[0]
    for value in allowed:
        assert value_of(Config.from_dict(nested(name, value)), name) == value
    for value in other_values(allowed):
        with pytest.raises(ConfigError) as refusal:
            Config.from_dict(nested(name, value))
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        assert str(refusal.value).startswith(f"{name}: {shown} is not available yet; the only value")


def test_the_features_to_come_are_off_only() -> None:
    to_come = {
        "engine.batch_invariant",
        "sampling.prompt_logprobs",
        "sampling.so_args",
    }
    assert to_come <= set(OFF_ONLY)
    with pytest.raises(ConfigError) as refusal:
        Config.from_dict({"engine": {"batch_invariant": True}})
    assert str(refusal.value) == "engine.batch_invariant: true is not available yet; the only value is false"


REFUSED = [
    # unknown keys: misspelt, misplaced, unknown group, unknown operation, not text
    ("engine.max_num_seq", 4, ["engine.max_num_seq: unknown key", "engine.max_num_seqs"]),
    ("dtype", "float32", ["dtype: unknown key", "model.dtype"]),
    ("engine.dtype", "float32", ["engine.dtype: unknown key", "model.dtype"]),
    ("modle", {"path": "x"}, ["modle: unknown key", "nearest known key is model"]),
    ("kernels.ops.sparse_atention", "auto", ["kernels.ops.sparse_atention: unknown key", "sparse_attention"]),
    (True, 1, ["True: unknown key", "nearest known key"]),
    # wrong types
    ("engine.max_num_seqs", "many", ["engine.max_num_seqs: many", "expected an integer"]),
    ("engine.max_num_seqs", True, ["engine.max_num_seqs: true", "expected an integer"]),
    ("engine.max_num_seqs", 2.5, ["engine.max_num_seqs: 2.5", "expected an integer"]),
    ("engine.max_num_seqs", None, ["engine.max_num_seqs: null", "expected an integer"]),
    ("engine.max_num_seqs", "12", ["engine.max_num_seqs: '12'", "expected an integer"]),
    ("engine.warmup", 1, ["engine.warmup: 1", "expected true or false"]),
    ("engine.memory_utilization", float("nan"), ["engine.memory_utilization: nan", "expected a number"]),
    ("engine", 3, ["engine: 3", "not a group"]),
    ("engine.replay", "off", ["engine.replay: off", "not a group"]),
    ("model.path", False, ["model.path: false", "expected text", "quote it"]),
    ("model.revision", 1234567, ["model.revision: 1234567", "expected text or null", "quote it"]),
    ("sampling.stop", "end", ["sampling.stop: end", "expected a list of text or null"]),
    ("sampling.stop", [1], ["sampling.stop: [1]", "a list of text"]),
    ("bench.batch_sizes", [1, "x"], ["bench.batch_sizes: [1, 'x']", "a list of integers"]),
    ("generate.prompts", {"a": 1}, ["generate.prompts", "a list of text"]),
    # values
    ("command", "genrate", ["command: genrate", "generate", "conformance"]),
    ("model.dtype", "float16", ["model.dtype: float16", "float32, bfloat16"]),
    ("model.quantize_activations", "yes", ["model.quantize_activations: yes", "auto, true, false"]),
    ("model.wo_a_input", "fp8", ["model.wo_a_input: fp8", "quantized, bf16"]),
    ("platform.name", "cuda", ["platform.name: cuda", "cpu, gpu, tpu"]),
    ("kernels.implementation", "cutlass", ["kernels.implementation: cutlass", "auto, reference"]),
    ("kernels.ops.expert_ffn", "cutlass", ["kernels.ops.expert_ffn: cutlass", "auto, reference"]),
    ("score.feed", "pieces", ["score.feed: pieces", "whole, chunked, stepwise"]),
    # ranges
    ("mesh.dp", 0, ["mesh.dp: 0", "at least 1"]),
    ("mesh.cp", -1, ["mesh.cp: -1", "at least 1"]),
    ("mesh.ep", 0, ["mesh.ep: 0", "at least 1"]),
    ("engine.max_num_seqs", 0, ["engine.max_num_seqs: 0", "at least 1"]),
    ("engine.max_model_len", 0, ["engine.max_model_len: 0", "at least 1"]),
    ("engine.num_blocks", 0, ["engine.num_blocks: 0", "at least 1"]),
    ("engine.log_interval", -1, ["engine.log_interval: -1", "at least 0"]),
    ("engine.memory_utilization", 0, ["engine.memory_utilization: 0", "more than 0"]),
    ("engine.memory_utilization", 1.5, ["engine.memory_utilization: 1.5", "at most 1"]),
    ("score.chunk", 0, ["score.chunk: 0", "at least 1"]),
    ("sampling.temperature", -0.5, ["sampling.temperature: -0.5", "at least 0"]),
    ("sampling.max_tokens", 0, ["sampling.max_tokens: 0", "at least 1"]),
    ("sampling.stop_token_ids", [5, -1], ["sampling.stop_token_ids: [5, -1]", "at least 0"]),
    ("bench.batch_sizes", [0], ["bench.batch_sizes: [0]", "at least 1"]),
    ("bench.batch_sizes", [], ["bench.batch_sizes: []", "ascending"]),
    ("bench.recording", 3, ["bench.recording: 3", "text or null"]),
    ("bench", {"recording": "a/b.npz", "kind": "slice"}, ["bench.recording: a/b.npz", "bench.kind = host", "slice"]),
    # impossible combinations, with their numbers
    ("mesh", {"dp": 4, "cp": 2, "ep": 3}, ["mesh.ep: 3", "4 x 2 = 8"]),
    ("engine.max_num_batched_tokens", 100, ["engine.max_num_batched_tokens: 100", "engine.block_size = 128"]),
    ("engine.max_num_seqs", 3000, ["engine.max_num_batched_tokens: 2048", "engine.max_num_seqs = 3000"]),
    ("engine.num_blocks", 31, ["engine.num_blocks: 31 x 128 = 3968", "engine.max_model_len = 4096", "at least 32"]),
    ("engine.prefill_buckets", [128, 128, 2048], ["engine.prefill_buckets: [128, 128, 2048]", "ascending"]),
    ("engine.prefill_buckets", [128, 1024], ["engine.prefill_buckets", "1024", "max_num_batched_tokens = 2048"]),
    ("engine.decode_buckets", [], ["engine.decode_buckets: []", "ascending"]),
    ("engine.decode_buckets", [1, 8], ["engine.decode_buckets", "8", "engine.max_num_seqs = 16"]),
    ("engine.context_buckets", [4000], ["engine.context_buckets", "4000", "engine.max_model_len = 4096"]),
    ("eval.n", 0, ["eval.n: 0", "at least 1"]),
    ("eval.n", 2000, ["eval.n: 2000", "at most 1024"]),
    ("eval.judge", "model", ["eval.judge: model", "rule, endpoint"]),
    ("eval.tasks", "aime", ["eval.tasks: aime", "a list of text"]),
    ("eval.tasks", [], ["eval.tasks: []", "one or more"]),
    ("eval.tasks", ["a", "b", "a"], ["eval.tasks: ['a', 'b', 'a']", "different names"]),
    ("eval.files", "aime.jsonl", ["eval.files: aime.jsonl", "expected a mapping or null"]),
    ("eval.files", {"aime": None}, ["eval.files: 'aime': None", "the path of its file"]),
    ("eval.files", {2025: "a.jsonl"}, ["eval.files: 2025: 'a.jsonl'", "a task's name"]),
    ("eval", {"judge": "endpoint", "judge_model": "m"}, ["eval.judge_url: is not set", "eval.judge = endpoint"]),
    ("eval", {"judge": "endpoint", "judge_url": "http://h/v1"}, ["eval.judge_model: is not set"]),
    ("speculative.enabled", "on", ["speculative.enabled: on", "expected true or false"]),
    ("speculative.num_draft_tokens", 0, ["speculative.num_draft_tokens: 0", "at least 1"]),
    ("speculative.num_draft_tokens", 2.5, ["speculative.num_draft_tokens: 2.5", "expected an integer"]),
    ("speculative.draft_sampling", "greedy", ["speculative.draft_sampling: greedy", "probabilistic, one_hot"]),
    ("speculative.confidence_temperatures", 1.2, ["speculative.confidence_temperatures: 1.2", "a list of numbers"]),
    (
        "speculative.confidence_temperatures",
        [1, 1, 1, 0, 1],
        ["speculative.confidence_temperatures: [1.0, 1.0, 1.0, 0.0, 1.0]", "more than 0"],
    ),
    (
        "speculative.confidence_temperatures",
        [1.1, 1.2],
        ["speculative.confidence_temperatures: [1.1, 1.2] are 2", "num_draft_tokens = 5", "or null"],
    ),
    (
        "speculative",
        {"num_draft_tokens": 3, "confidence_temperatures": [1, 1, 1, 1, 1]},
        ["speculative.confidence_temperatures", "are 5", "num_draft_tokens = 3"],
    ),
    (
        "speculative",
        {"coupled": True, "draft_sampling": "one_hot"},
        ["speculative.draft_sampling: one_hot", "speculative.coupled"],
    ),
    ("engine.replay.decoder", "on", ["engine.replay.decoder: on", "off, mask, compact"]),
    ("engine.replay.keep_tokens", 0, ["engine.replay.keep_tokens: 0", "at least 1"]),
    ("engine.watermark", 0, ["engine.watermark: 0", "more than 0"]),
    ("engine.max_waiting", 0, ["engine.max_waiting: 0", "at least 1"]),
    ("engine.deadline_s", 0, ["engine.deadline_s: 0", "more than 0"]),
    ("engine", {"type": "prompt", "policy": "deepinfer"}, ["engine.policy: deepinfer", "engine.type = prompt"]),
    ("generate", {"prompts": ["a"], "input": "b.jsonl"}, ["generate.input", "b.jsonl", "generate.prompts"]),
]


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_refusals_name_the_key_the_value_and_what_is_expected(name: Any, value: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        Config.from_dict(nested(name, value) if isinstance(name, str) else {name: value})
    message = str(refusal.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert isinstance(refusal.value, UserError) and refusal.value.exit_code == 2


def test_bench_lengths_must_fit_only_when_benching() -> None:
    raw = {"bench": {"prompt_len": 4000, "output_len": 100}}
    assert Config.from_dict(raw).bench.prompt_len == 4000
    with pytest.raises(ConfigError, match=r"4000 \+ 100 = 4100 exceed engine.max_model_len = 4096"):
        Config.from_dict({**raw, "command": "bench"})
    with pytest.raises(ConfigError, match=r"bench.batch_sizes: 17 .* engine.max_num_seqs = 16"):
        Config.from_dict({"command": "bench", "bench": {"batch_sizes": [1, 17]}})


def test_a_recording_is_for_runs_with_drafts() -> None:
    raw = {"command": "bench", "bench": {"kind": "host", "recording": "a/b.npz"}}
    with pytest.raises(ConfigError, match=r"bench.recording: a/b.npz needs speculative.enabled = true"):
        Config.from_dict(raw)
    assert Config.from_dict({**raw, "speculative": {"enabled": True}}).bench.recording == "a/b.npz"


def test_replace_checks_too() -> None:
    config = Config()
    with pytest.raises(ConfigError, match=r"engine.max_num_seqs: 0"):
        dataclasses.replace(config, engine=dataclasses.replace(config.engine, max_num_seqs=0))
    with pytest.raises(ConfigError, match="engine: 3"):
        dataclasses.replace(config, engine=3)  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.command = "score"  # type: ignore[misc]


# What is accepted ---------------------------------------------------------------------------------------------------


def test_empty_files_and_empty_groups_have_the_defaults(write: Any) -> None:
    assert load_config(write("")) == Config()
    assert load_config(write("engine:\n  # max_num_seqs: 4\nmodel: {}\n")) == Config()


def test_ways_to_draft() -> None:
    """The defaults of the command-line contract, and what each setting comes to."""
    group = Config().speculative
    assert group.num_draft_tokens == 5 and group.varlen and not group.coupled
    assert group.confidence_temperatures is None
    ways = ({}, "probabilistic"), ({"draft_sampling": "one_hot"}, "one_hot"), ({"coupled": True}, "coupled")
    for values, way in ways:
        assert dataclasses.replace(group, **values).way == way  # type: ignore[arg-type]
    calibrated = Config.from_dict({"speculative": {"num_draft_tokens": 2, "confidence_temperatures": [1, 0.5]}})
    assert calibrated.speculative.confidence_temperatures == (1.0, 0.5)


def test_nothing_is_drafted_where_nothing_decodes() -> None:
    config = Config.from_dict({"speculative": {"enabled": True, "num_draft_tokens": 3}})
    for values, drafts in (
        ({}, True),
        ({"command": "bench"}, True),
        ({"engine.type": "completion"}, True),
        ({"command": "score"}, False),
        ({"engine.type": "prompt"}, False),
    ):
        changed = config.with_values(values)
        assert changed.drafting == dataclasses.replace(config.speculative, enabled=drafts)
        assert changed.speculative.enabled, "what was asked stays as it is"
    assert not Config().with_values({"command": "generate"}).drafting.enabled


def test_kernel_overrides() -> None:
    kernels = Config.from_dict({"kernels": {"ops": {"index_topk": "reference"}}}).kernels
    assert (kernels.implementation, kernels.overrides) == ("auto", (("index_topk", "reference"),))
    assert Config().kernels.overrides == ()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e4", 10000), ("1.0e+4", 10000), ("1.5e3", 1500), ("4096.0", 4096), ("1_000", 1000)],
)
def test_exact_numbers_are_integers(text: str, value: int, write: Any) -> None:
    config = load_config(write(f"engine: {{max_model_len: {text}}}"))
    assert config.engine.max_model_len == value
    assert type(config.engine.max_model_len) is int


@pytest.mark.parametrize("text", ["1e-1", "1.5e0", "1e999", "e4", "'4096'", "4096.5", "0x"])
def test_other_numbers_are_not(text: str, write: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine.max_model_len: .* expected an integer"):
        load_config(write(f"engine: {{max_model_len: {text}}}"))


@pytest.mark.parametrize(("text", "value"), [("1e-1", 0.1), ("1", 1.0), ("5.e-1", 0.5), (".25", 0.25)])
def test_numbers_for_a_float_key(text: str, value: float, write: Any) -> None:
    utilization = load_config(write(f"engine: {{memory_utilization: {text}}}")).engine.memory_utilization
    assert utilization == value
    assert type(utilization) is float


# YAML -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["off", "'off'", "false", "no"])
@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_unquoted_off_means_off(name: str, text: str, write: Any) -> None:
    in_file = load_config(write(f"engine: {{replay: {{{name}: {text}}}}}"))
    through_set = load_config(write(""), [f"engine.replay.{name}={text}"])
    assert in_file == through_set
    assert getattr(in_file.engine.replay, name) == "off"


@pytest.mark.parametrize("text", ["on", "true", "'on'"])
def test_unquoted_on_is_on_for_the_encoder_alone(text: str, write: Any) -> None:
    for config in (
        load_config(write(f"engine: {{replay: {{encoder: {text}}}}}")),
        load_config(write(""), [f"engine.replay.encoder={text}"]),
    ):
        assert config.engine.replay.encoder == "on"
    with pytest.raises(ConfigError, match=r"engine.replay.decoder: (true has the wrong type|on is not known)"):
        load_config(write(""), [f"engine.replay.decoder={text}"])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: {path: a}\nengine: {}\nmodel: {path: b}\n", 3),
        ("engine:\n  max_num_seqs: 1\n  max_num_seqs: 2\n", 3),
        ("engine: {replay: {decoder: off, decoder: off}}\n", 1),
    ],
)
def test_a_key_written_twice_is_an_error(text: str, line: int, write: Any) -> None:
    with pytest.raises(ConfigError, match=rf"some.yaml, line {line}: .* is written twice"):
        load_config(write(text))


def test_overriding_a_merged_key_is_no_duplicate(write: Any) -> None:
    text = "engine: &e {max_num_seqs: 3, replay: {decoder: off}}\nengine: 1\n"
    with pytest.raises(ConfigError, match="written twice"):
        load_config(write(text))
    merged = "score: {<<: &s {chunk: 3, trace: true}, chunk: 5}\n"
    assert (load_config(write(merged)).score.chunk, load_config(write(merged)).score.trace) == (5, True)


@pytest.mark.parametrize(
    "text",
    ["engine: [1", "a: b: c", "\x07", "- 1\n- 2", "just text", "x: 2024-99-99", "[" * 5000, "x: !!python/name:os"],
)
def test_what_is_not_a_mapping_of_groups_is_one_line(text: str, write: Any) -> None:
    with pytest.raises(ConfigError, match=r"some\.yaml") as refusal:
        load_config(write(text))
    assert "\n" not in str(refusal.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("model: {path: é}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.yaml: cannot be read"):
        load_config(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path)


# --set ----------------------------------------------------------------------------------------------------------------


def test_set_values_are_yaml_and_the_last_one_wins(write: Any) -> None:
    path = write("engine: {max_num_seqs: 4}\nscore: {chunk: 7}\n")
    assignments = [
        "engine.max_num_seqs=5",
        "engine.max_num_seqs=6",
        "generate.prompts=[a=b, 'c']",
        "model.path=/some/folder",
        "model.revision=null",
        "kernels.ops.index_topk=reference",
        "sampling.temperature=0",
        "score.trace=yes",
    ]
    config = load_config(path, assignments)
    assert config.engine.max_num_seqs == 6
    assert config.generate.prompts == ("a=b", "c")
    assert (config.model.path, config.model.revision) == ("/some/folder", None)
    assert config.kernels.ops.index_topk == "reference"
    assert (config.sampling.temperature, config.score.trace, config.score.chunk) == (0.0, True, 7)


def test_set_does_not_leak_through_yaml_aliases(write: Any) -> None:
    config = load_config(write("sampling: &a {}\nscore: *a\n"), ["score.chunk=3"])
    assert config == Config().with_values({"score.chunk": 3})


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("engine.max_num_seqs", ["--set engine.max_num_seqs", "dotted.key=value"]),
        ("=3", ["--set =3", "dotted.key=value"]),
        ("engine.max_num_sequences=3", ["engine.max_num_sequences: unknown key", "engine.max_num_seqs"]),
        ("engine.nothing.deeper=3", ["engine.nothing: unknown key"]),
        ("model.dtype.deeper=3", ["model.dtype.deeper", "model.dtype is a key"]),
        ("engine={max_num_seqs: 3}", ["engine: is a group", "engine.type"]),
        ("engine.replay=", ["engine.replay: is a group", "engine.replay.decoder"]),
        ("model.path=", ["model.path: null", "expected text"]),
        ("model.path=[", ["--set model.path=[", "not readable as YAML"]),
        ("engine.max_num_seqs=0", ["engine.max_num_seqs: 0", "at least 1"]),
    ],
)
def test_wrong_assignments(assignment: str, words: list[str], write: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(write(""), [assignment])
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_set_into_a_group_that_is_none() -> None:
    assert Config().with_values({"engine.replay.keep_tokens": 140}) == Config()


def test_set_into_a_broken_group(write: Any) -> None:
    with pytest.raises(ConfigError, match="engine: 3 is not a group"):
        load_config(write("engine: 3"), ["engine.max_num_seqs=2"])


# Packaged configs -----------------------------------------------------------------------------------------------------

PACKAGED = sorted(path.stem for path in (Path(__file__).parent.parent / "configs").glob("*.yaml"))


def test_packaged_configs_are_there() -> None:
    assert {"quickstart", "ep8", "ep64"} <= set(PACKAGED)


@pytest.mark.parametrize("name", PACKAGED)
def test_bare_names_resolve_from_anywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(name) == load_config(f"{name}.yaml")
    assert find_config(name).read_text(encoding="utf-8").startswith("#"), "a packaged config explains itself"


def test_a_file_comes_before_a_packaged_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").write_text("score: {chunk: 3}")
    (tmp_path / "ep64").mkdir()
    assert load_config("quickstart.yaml").score.chunk == 3
    assert load_config("quickstart").score.chunk == Config().score.chunk
    assert load_config("ep64").mesh.world == 64


def test_an_unknown_name_lists_the_packaged_ones() -> None:
    names = ".*ep4_prefill, ep64, ep8, .*quickstart"
    with pytest.raises(ConfigError, match=f"'quickstrat': no such file; packaged configs: {names}"):
        load_config("quickstrat")


def test_deployments() -> None:
    ep64, ep8, quickstart = (load_config(name) for name in ("ep64", "ep8", "quickstart"))
    assert (ep64.mesh.dp, ep64.mesh.cp, ep64.mesh.ep, ep64.mesh.world) == (64, 1, 64, 64)
    assert (ep8.mesh.dp, ep8.mesh.cp, ep8.mesh.ep) == (8, 1, 8)
    assert quickstart.mesh.world == 1 and quickstart.model.path == "demo"
    assert quickstart.generate.prompts
    assert load_config("quickstart", ["command=bench"]).command == "bench"


# Round trips ----------------------------------------------------------------------------------------------------------

texts = st.text(max_size=20)
counts = st.integers(1, 10**6)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Plain trees that are valid configs, with any subset of the keys that can change."""
    ep = draw(st.integers(1, 8))
    optional = {
        "command": st.sampled_from(["generate", "score", "plan", "serve"]),
        "model": st.fixed_dictionaries(
            {},
            optional={
                "path": texts,
                "revision": st.none() | texts,
                "dtype": st.sampled_from(["float32", "bfloat16"]),
                "quantize_caches": st.booleans(),
                "quantize_activations": st.sampled_from(["auto", True, False]),
                "wo_a_input": st.sampled_from([None, "quantized", "bf16"]),
            },
        ),
        "mesh": st.just({"dp": ep * draw(st.integers(1, 4)), "ep": ep, "cp": draw(st.integers(1, 3))}),
        "engine": st.fixed_dictionaries(
            {"max_num_batched_tokens": st.integers(128, 10**6), "max_num_seqs": st.integers(1, 128)},
            optional={
                "max_model_len": counts,
                "memory_utilization": st.floats(0, 1, exclude_min=True),
                "prefill_buckets": st.just([128, 10**6]),
                "replay": st.just({"decoder": False, "encoder": "off"}),
                "warmup": st.booleans(),
            },
        ),
        "kernels": st.just({"ops": {"index_topk": draw(st.sampled_from([None, "auto", "reference"]))}}),
        "cache": st.fixed_dictionaries({}, optional={"compile_dir": st.none() | texts}),
        "sampling": st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.floats(0, 1e300) | st.integers(0, 100),
                "stop": st.none() | st.lists(texts, max_size=3),
                "seq_seed": st.none() | st.integers(-(2**70), 2**70),
                "ignore_eos": st.booleans(),
            },
        ),
        "generate": st.fixed_dictionaries({}, optional={"prompts": st.none() | st.lists(texts, max_size=3)}),
    }
    return draw(st.fixed_dictionaries({}, optional=optional))


@given(trees())
def test_the_printed_config_reads_back_equal(raw: dict[str, Any]) -> None:
    config = Config.from_dict(raw)
    read = Config.from_dict(yaml.safe_load(config.to_yaml()))
    assert read == config
    assert read.digest() == config.digest()
    assert Config.from_dict(config.to_dict()) == config
    assert hash(read) == hash(config)


@given(texts)
@example("\x85")
@example("a\u2028 b")
@example("off")
@example("1e6")
def test_the_printed_config_reads_back_from_a_file(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    config = Config().with_values({"model.path": path})
    file = tmp_path_factory.getbasetemp() / "printed.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8", newline="")
    assert load_config(file) == config


def test_the_digest_is_of_the_values_alone() -> None:
    config = Config()
    assert config.digest() == Config.from_dict({"sampling": {"max_tokens": 16.0}}).digest()
    changed = config.with_values({"sampling.max_tokens": 17})
    assert changed.digest() != config.digest()
    assert changed.digest("model", "mesh") == config.digest("model", "mesh")
    assert config.with_values({"mesh.dp": 2}).digest("model", "mesh") != config.digest("model", "mesh")
    with pytest.raises(ConfigError, match=r"modle: unknown key; the nearest known key is model"):
        config.digest("modle")


def test_the_digest_does_not_depend_on_the_process() -> None:
    code = "from di_jax.config import load_config; print(load_config('ep8').digest())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == load_config("ep8").digest()


def test_the_files_of_eval_are_a_mapping(write: Any) -> None:
    path = write("eval: {tasks: [b], files: {a: a.jsonl, b: dir/b.jsonl}}")
    config = load_config(path, ["eval.files={b: other.jsonl}", "eval.n=4"])
    assert (config.eval.files, config.eval.n, config.eval.tasks) == ({"b": "other.jsonl"}, 4, ("b",))
    assert load_config(path).eval.files == {"a": "a.jsonl", "b": "dir/b.jsonl"}
    assert Config.from_dict(yaml.safe_load(config.to_yaml())) == config
    with pytest.raises(ConfigError, match=r"eval\.files\.b: eval\.files is a key, not a group"):
        load_config(path, ["eval.files.b=other.jsonl"])


def test_the_packaged_temperatures_are_the_fitted_ones() -> None:
    fitted = json.loads((Path(__file__).parents[1] / "scripts" / "results" / "demo-sts.json").read_text())
    group = load_config("speculative").speculative
    assert group.enabled and group.confidence_temperatures == tuple(fitted["confidence_temperatures"])
