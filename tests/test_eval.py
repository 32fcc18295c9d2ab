"""The eval command: samples of an engine or of a dump, judged and scored; files, tables, exit codes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from judge_endpoint import Endpoint, serving

from di_jax import run
from di_jax.commands import eval as command
from di_jax.config import Config
from di_jax.evaluation.samples import read_samples
from di_jax.sampling_params import SamplingParams
from scripts import plot_eval

if TYPE_CHECKING:
    from di_jax.llm import LLM

ARITHMETIC = [
    {"id": "a", "task": "x", "prompt": "1+1", "answer": "2"},
    {"id": "b", "task": "x", "prompt": "1+2", "answer": "3"},
    {"id": "c", "task": "x", "prompt": "2+2", "answer": "4", "meta": {"judge": "number"}},
]
COPY = [{"id": "a", "task": "y", "prompt_token_ids": [5, 6], "answer": "z", "meta": {}}]


class StandIn:
    """In the place of an LLM: answers[prompt] holds the texts of its samples, or the error of the request."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.config: Config | None = None
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.folder = Path("nowhere")

    def get_tokenizer(self) -> StandIn:
        return self

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "<think>" if ids == [7] else "x"

    def generate_iter(self, prompts: list[Any], params: SamplingParams) -> Iterator[Any]:
        from di_jax.llm import CompletionOutput, RequestOutput

        for index in reversed(range(len(prompts))):  # as an engine does, not in the order of the prompts
            self.asked.append((prompts[index], params))
            (content,) = prompts[index].values()
            answer = self.answers[str(content)]
            ids = list(content) if isinstance(content, tuple) else [1]
            if isinstance(answer, dict):
                yield RequestOutput(str(index), index, None, ids, [], True, error=answer)
                continue
            assert len(answer) == params.n
            outputs = [CompletionOutput(i, text, [i, 9], -1.0, "stop") for i, text in enumerate(answer)]
            yield RequestOutput(str(index), index, None, ids, outputs, True, 77, {})


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def config_file(tmp_path: Path, tiny_config: Config) -> Path:
    files = {
        "sums": str(write(tmp_path / "sums.jsonl", ARITHMETIC)),
        "copy": str(write(tmp_path / "copy.jsonl", COPY)),
    }
    config = tiny_config.with_values({"eval.files": files, "eval.tasks": ["sums", "copy"]})
    (tmp_path / "tiny.yaml").write_text(config.to_yaml())
    return tmp_path / "tiny.yaml"


@pytest.fixture
def evaluate(
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Callable[..., tuple[int, str, str]]:
    """`eval` with a stand-in: (exit code, stdout, log and what else went to stderr)."""

    def call(model: StandIn | None, *argv: Any) -> tuple[int, str, str]:
        @contextlib.contextmanager
        def load(config: Config) -> Iterator[StandIn]:
            assert model is not None, "loaded"
            model.config = config
            yield model

        monkeypatch.setattr(command, "load_model", load)
        caplog.clear()
        code = run.main(["eval", "--config", str(config_file), *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, caplog.text + err

    return call


Evaluate = Callable[..., tuple[int, str, str]]
RIGHT_AND_WRONG = {"1+1": ["2"], "1+2": ["4"], "2+2": ["It is 4."], "(5, 6)": ["z"]}


def test_the_table_and_the_json(evaluate: Evaluate) -> None:
    model = StandIn(RIGHT_AND_WRONG)
    code, out, err = evaluate(model, "--json")
    *table, last = out.splitlines()
    assert code == 0
    assert table[0].split() == ["task", "items", "samples", "score", "metric"]
    assert [line.split() for line in table[1:3]] == [
        ["sums", "3", "3", "0.6667", "pass@1"],
        ["copy", "1", "1", "1.0000", "pass@1"],
    ]
    assert table[3:] == ["sampling: temperature 0.0, max_tokens 8, n 1", "judge: rule"]
    assert json.loads(last) == {
        "tasks": {
            "sums": {"n": 3, "score": pytest.approx(2 / 3), "metric": "pass@1"},
            "copy": {"n": 1, "score": 1.0, "metric": "pass@1"},
        }
    }
    assert "engine.replay.decoder is off" in err and "all alike" not in err and "cut off" not in err
    assert model.config is not None and model.config.engine.replay.decoder == "off"
    assert [prompt for prompt, _ in model.asked][::-1][0] == {"prompt": "1+1"}
    assert "tasks" not in evaluate(StandIn(RIGHT_AND_WRONG))[1]


def test_tasks_are_picked_and_ordered_by_the_config(evaluate: Evaluate) -> None:
    code, out, _ = evaluate(StandIn({"(5, 6)": ["z"]}), "--set", "eval.tasks=[copy]")
    assert code == 0 and "sums" not in out
    code, out, _ = evaluate(StandIn(RIGHT_AND_WRONG), "--set", "eval.tasks=null", "--json")
    assert set(json.loads(out.splitlines()[-1])["tasks"]) == {"sums", "copy"}


def test_pass_at_1_is_the_mean_over_samples(evaluate: Evaluate) -> None:
    answers = {"1+1": ["2", "2"], "1+2": ["3", "4"], "2+2": ["5", "5"]}
    model = StandIn(answers)
    argv = ["--set", "eval.tasks=[sums]", "--set", "eval.n=2", "--set", "sampling.temperature=0.7", "--json"]
    code, out, err = evaluate(model, *argv)
    assert code == 0 and "all alike" not in err
    assert json.loads(out.splitlines()[-1]) == {"tasks": {"sums": {"n": 3, "score": 0.5, "metric": "pass@1"}}}
    assert out.splitlines()[1].split()[1:3] == ["3", "6"]
    assert "sampling: temperature 0.7, max_tokens 8, n 2" in out
    assert {(params.n, params.temperature) for _, params in model.asked} == {(2, 0.7)}
    _, _, err = evaluate(StandIn(answers), "--set", "eval.tasks=[sums]", "--set", "eval.n=2")
    assert "sampling.temperature: is 0, so the eval.n = 2 samples of an item are all alike" in err


def test_a_dump_is_judged_like_what_was_generated(evaluate: Evaluate, tmp_path: Path) -> None:
    """Failures included; the second judging loads nothing (its stand-in is None)."""
    dump = tmp_path / "dump.jsonl"
    dump.write_text("old\n")
    failure = {"type": "invalid_request", "message": "prompt: has 999 tokens"}
    answers = {**{p: [a[0], "2"] for p, a in RIGHT_AND_WRONG.items()}, "2+2": failure}
    argv = ["--set", "eval.n=2", "--set", "sampling.stop=[END]", "--json"]
    first = evaluate(StandIn(answers), *argv, "--dump", dump)
    second = evaluate(None, *argv, "--judge-only", dump)
    assert first[:2] == second[:2] and first[0] == 1
    assert json.loads(first[1].splitlines()[-1])["tasks"]["sums"]["score"] == pytest.approx(1 / 3)
    for _, _, err in (first, second):
        assert "sums: item c, sample 1: prompt: has 999 tokens" in err
        assert "2 of 8 samples failed and count as wrong" in err
    records = [json.loads(line) for line in dump.read_text().splitlines()]
    assert len(records) == 8
    sampling = {"temperature": 0.0, "max_tokens": 8, "n": 2, "stop": ["END"]}
    by_identity = {(r["task"], r["id"], r["sample"]): r for r in records}
    assert by_identity["copy", "a", 1] == {
        "task": "copy", "id": "a", "sample": 1, "prompt_token_ids": [5, 6], "answer": "z", "meta": {},
        "sampling": sampling, "seq_seed": 77, "thinking": False, "text": "2", "token_ids": [1, 9],
        "finish_reason": "stop",
    }  # fmt: skip
    assert by_identity["sums", "c", 0] == {
        "task": "sums", "id": "c", "sample": 0, "prompt": "2+2", "answer": "4", "meta": {"judge": "number"},
        "sampling": sampling, "error": failure,
    }  # fmt: skip
    assert [sample.record() for sample in read_samples(dump)] == [
        {**r, **{k: tuple(r[k]) for k in ("prompt_token_ids", "token_ids") if k in r}} for r in records
    ]
    code, out, _ = evaluate(None, "--judge-only", dump, "--set", "eval.tasks=[copy]", "--set", "eval.files=null")
    assert code == 0 and "sums" not in out
    code, _, err = evaluate(None, "--judge-only", dump, "--set", "eval.tasks=[aime]")
    assert code == 2 and "eval.tasks: aime has no samples in" in err.splitlines()[-1]


def test_reasoning_that_never_ends_is_no_answer(evaluate: Evaluate, config_file: Path) -> None:
    """The prompt ends with <think> (id 7 here), so that the text itself does not begin with it."""
    item = {"id": "a", "task": "y", "prompt_token_ids": [5, 7], "answer": "z"}
    write(config_file.parent / "copy.jsonl", [item, {**item, "id": "b", "prompt_token_ids": [7, 5]}])
    argv = ["--set", "eval.tasks=[copy]", "--set", "eval.n=2", "--json", "--dump", config_file.parent / "dump.jsonl"]
    _, out, _ = evaluate(StandIn({"(5, 7)": ["z", "so</think>z"], "(7, 5)": ["z", "so</think>z"]}), *argv)
    assert json.loads(out.splitlines()[-1])["tasks"]["copy"]["score"] == 0.75
    assert {(s.item.id, s.thinking) for s in read_samples(config_file.parent / "dump.jsonl")} == {
        ("a", True),
        ("b", False),
    }


def test_judging_a_dump_imports_no_jax(config_file: Path) -> None:
    sample = {**ARITHMETIC[0], "sample": 0, "text": "2"}
    dump = write(config_file.parent / "dump.jsonl", [sample])
    argv = ["eval", "--config", str(config_file), "--set", "eval.tasks=null", "--json", "--judge-only", str(dump)]
    code = f"import sys\nfrom di_jax import run\ncode = run.main({argv!r})\nassert 'jax' not in sys.modules\nexit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"tasks": {"x": {"n": 1, "score": 1.0, "metric": "pass@1"}}}
    assert "sampling: not known" in done.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--set", "eval.files=null", "--set", "eval.tasks=null"], ["eval.tasks: there is nothing to evaluate"]),
        (["--set", "eval.files=null"], ["eval.files: has no file for task sums", "is not set", "sums: FILE.jsonl"]),
        (["--set", "eval.tasks=[sums, hle]"], ["eval.files: has no file for task hle", "it has sums, copy"]),
        (["--set", "eval.files={sums: no.jsonl, copy: no.jsonl}"], ["no.jsonl: cannot be read"]),
        (["--dump", "{tmp}"], ["dump {tmp}: cannot be written: Is a directory"]),
        (["--dump", "{tmp}/none/d.jsonl"], ["d.jsonl: cannot be written: No such file", "a folder you own"]),
        (["--dump", "{tmp}/sums.jsonl"], ["sums.jsonl: is also the input"]),
        (["--judge-only", "{tmp}/none.jsonl"], ["none.jsonl: cannot be read"]),
        (["--judge-only", "{tmp}/sums.jsonl"], ["sums.jsonl:1: sample must be a number", "--dump"]),
        (["--judge-only", "{tmp}/nested.jsonl"], ["nested.jsonl:1: not valid JSON", "expected one object a line"]),
        (["--set", "eval.files={sums: '{tmp}/digits.jsonl', copy: no.jsonl}"], ["digits.jsonl:1: not valid JSON"]),
        (["--set", "sampling.temperature=1e-9"], ["sampling.temperature: 1e-09 is out of range"]),
    ],
)
def test_what_cannot_be_used_is_one_line_before_the_model_is_loaded(
    argv: list[str], words: list[str], evaluate: Evaluate, tmp_path: Path
) -> None:
    (tmp_path / "nested.jsonl").write_text("[" * 20_000)
    (tmp_path / "digits.jsonl").write_text('{"id": ' + "7" * 5000 + "}")
    code, out, err = evaluate(None, *(word.replace("{tmp}", str(tmp_path)) for word in argv))
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and all(w.replace("{tmp}", str(tmp_path)) in last for w in words), last
    assert json.loads((tmp_path / "sums.jsonl").read_text().splitlines()[0]) == ARITHMETIC[0]


def test_items_that_no_rule_can_judge_are_found_before_generating(evaluate: Evaluate, tmp_path: Path) -> None:
    for meta, answer, words in (
        ({"judge": "number"}, "four", "item a: its answer 'four' has no number"),
        ({"judge": "json"}, "{", "item a: its answer is no JSON"),
        ({"judge": "nobody"}, "4", "item a: unknown judge 'nobody'"),
        ({"judge": ["exact"]}, "4", "item a: unknown judge ['exact']"),
    ):
        write(tmp_path / "copy.jsonl", [{**COPY[0], "answer": answer, "meta": meta}])
        code, _, err = evaluate(None, "--set", "eval.tasks=[copy]")
        last = err.splitlines()[-1]
        assert code == 2 and "copy.jsonl: " in last and words in last and "eval.judge: endpoint" in last


def test_objects_as_answers_are_judged_as_json_and_kept_in_the_dump(evaluate: Evaluate, tmp_path: Path) -> None:
    answers = [{"name": "x"}, [1, 2], True]
    records = [
        {"id": str(i), "task": "x", "prompt": str(i), "answer": answer, "meta": {"judge": "json"}}
        for i, answer in enumerate(answers)
    ]
    write(tmp_path / "sums.jsonl", records)
    argv = ["--set", "eval.tasks=[sums]", "--json"]
    said = StandIn({"0": ['{ "name":"x"}'], "1": ["[1, 3]"], "2": ["true"]})
    code, out, _ = evaluate(said, *argv, "--dump", tmp_path / "dump.jsonl")
    assert code == 0 and json.loads(out.splitlines()[-1])["tasks"]["sums"]["score"] == pytest.approx(2 / 3)
    assert [sample.item.answer for sample in read_samples(tmp_path / "dump.jsonl")][::-1] == list(
        map(json.dumps, answers)
    )
    assert evaluate(None, *argv, "--judge-only", tmp_path / "dump.jsonl")[1] == out


def test_a_dump_that_is_full_is_one_line(evaluate: Evaluate) -> None:
    code, out, err = evaluate(StandIn(RIGHT_AND_WRONG), "--dump", "/dev/full")
    assert (code, out) == (2, "")
    message = "error: dump /dev/full: cannot be written: No space left on device; the lines before are in it"
    assert err.splitlines()[-1] == message


def test_an_old_dump_is_kept_until_the_model_is_loaded(evaluate: Evaluate, tmp_path: Path) -> None:
    class Interrupted(StandIn):
        def generate_iter(self, prompts: list[Any], params: SamplingParams) -> Iterator[Any]:
            outputs = super().generate_iter(prompts, params)
            yield next(outputs)
            raise KeyboardInterrupt

    dump = tmp_path / "dump.jsonl"
    dump.write_text("hours of work\n")
    code, _, _ = evaluate(StandIn(RIGHT_AND_WRONG), "--dump", dump, "--set", "eval.tasks=[hle]")
    assert code == 2 and dump.read_text() == "hours of work\n"
    assert evaluate(Interrupted(RIGHT_AND_WRONG), "--dump", dump)[0] == 130
    assert [sample.item.task for sample in read_samples(dump)] == ["copy"], "what was there before the interrupt"


# The endpoint judge -------------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as made:
        yield made


def endpoint_options(endpoint: Endpoint, *more: str) -> list[str]:
    values = ("eval.judge=endpoint", f"eval.judge_url={endpoint.url}", "eval.judge_model=big", *more)
    return [word for value in values for word in ("--set", value)]


def test_an_endpoint_judges_and_its_silence_is_a_failure(
    evaluate: Evaluate, endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret\n")
    endpoint.says("correct: yes", "correct: no", "I cannot say", "correct: yes")
    options = endpoint_options(endpoint, f"eval.judge_key_file={tmp_path / 'key'}")
    code, out, err = evaluate(StandIn(RIGHT_AND_WRONG), *options, "--json")
    scores = json.loads(out.splitlines()[-1])["tasks"]
    # In the order of finishing: copy, then sums c, b, a.
    assert code == 1 and scores["copy"]["score"] == 1.0 and scores["sums"]["score"] == pytest.approx(1 / 3)
    assert "sums: item b, sample 0:" in err and "I cannot say" in err
    assert "1 of 4 samples failed and count as wrong" in err
    assert "judge: endpoint (big)" in out and "secret" not in out + err
    assert [r["key"] for r in endpoint.requests] == ["Bearer secret"] * 4
    assert "1+1" in endpoint.requests[3]["body"]["messages"][0]["content"]


def test_requests_that_failed_are_not_judged(evaluate: Evaluate, endpoint: Endpoint) -> None:
    answers = {**RIGHT_AND_WRONG, "1+1": {"type": "model_error", "message": "not finite"}}
    endpoint.says("correct: yes", "correct: yes", "correct: yes")
    code, out, _ = evaluate(StandIn(answers), *endpoint_options(endpoint), "--json")
    assert code == 1 and json.loads(out.splitlines()[-1])["tasks"]["sums"]["score"] == pytest.approx(2 / 3)
    assert len(endpoint.requests) == 3


def test_an_endpoint_that_refuses_ends_the_run_and_says_where_the_answers_are(
    evaluate: Evaluate, endpoint: Endpoint, tmp_path: Path
) -> None:
    dump = tmp_path / "dump.jsonl"
    endpoint.answers += [(401, b"no key"), (401, b"no key"), (401, b"no key")]
    options = endpoint_options(endpoint)
    for more, advice in ((["--dump", dump], f"judge {dump} by --judge-only"), ([], "--dump would have kept")):
        code, out, err = evaluate(StandIn(RIGHT_AND_WRONG), *options, *more)
        assert (code, out) == (2, "")
        assert "judge answered 401" in err.splitlines()[-1] and advice in err.splitlines()[-1]
    code, _, err = evaluate(None, *options, "--judge-only", dump)
    assert code == 2 and "--dump" not in err.splitlines()[-1]
    endpoint.says(*["correct: yes"] * 4)
    assert evaluate(None, *options, "--judge-only", dump)[0] == 0


def test_endpoint_keys_are_checked_before_the_model_is_loaded(
    evaluate: Evaluate, endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "empty").write_text("\n")
    for options, words in (
        (["--set", "eval.judge=endpoint"], "eval.judge_url: is not set"),
        (["--set", "eval.judge=endpoint", "--set", "eval.judge_url=http://h/v1"], "eval.judge_model: is not set"),
        (endpoint_options(endpoint, "eval.judge_url=h/v1"), "eval.judge_url: h/v1: "),
        (endpoint_options(endpoint, "eval.judge_url=http://[::1"), "eval.judge_url: http://[::1: "),
        (endpoint_options(endpoint, "eval.judge_url=http://"), "eval.judge_url: http://: "),
        (endpoint_options(endpoint, "eval.judge_url=http://a b/v1"), "eval.judge_url: http://a b/v1: "),
        (endpoint_options(endpoint, f"eval.judge_key_file={tmp_path}/no"), "eval.judge_key_file: "),
        (endpoint_options(endpoint, f"eval.judge_key_file={tmp_path}/empty"), "eval.judge_key_file: "),
    ):
        code, out, err = evaluate(None, *options)
        assert (code, out) == (2, "") and words in err.splitlines()[-1], err.splitlines()[-1]
    assert not endpoint.requests


# The engine ---------------------------------------------------------------------------------------------------------


def test_an_engine_answers_and_its_dump_gives_the_same_numbers(
    llm: LLM,
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer of the first item is what the model says, of the second it is not; the third is too long."""
    prompts = ["The river", "A stone"]
    said = [output.outputs[0] for output in llm.generate(prompts, {"max_tokens": 4, "temperature": 0})]
    items = [
        {"id": "right", "task": "t", "prompt": prompts[0], "answer": said[0].text},
        {"id": "wrong", "task": "t", "prompt": prompts[1], "answer": said[1].text + " not"},
        {"id": "long", "task": "t", "prompt_token_ids": [5] * 400, "answer": "a"},
    ]
    write(tmp_path / "sums.jsonl", items)

    @contextlib.contextmanager
    def shared(config: Config) -> Iterator[LLM]:
        assert config.engine == llm.config.engine
        yield llm

    monkeypatch.setattr(command, "load_model", shared)
    dump = tmp_path / "dump.jsonl"
    argv = ["eval", "--config", str(config_file), "--set", "eval.tasks=[sums]", "--set", "sampling.max_tokens=4"]
    assert run.main([*argv, "--json", "--dump", str(dump)]) == 1
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["tasks"] == {
        "sums": {"n": 3, "score": pytest.approx(1 / 3), "metric": "pass@1"}
    }
    assert "sums: item long, sample 0: prompt: has 400 tokens" in caplog.text
    samples = {sample.item.id: sample for sample in read_samples(dump)}
    assert [list(samples[i].token_ids) for i in ("right", "wrong")] == [answer.token_ids for answer in said]
    assert samples["right"].finish_reason == said[0].finish_reason == "length"
    assert "2 of 3 answers were cut off at their length" in caplog.text
    assert run.main([*argv, "--json", "--judge-only", str(dump)]) == 1
    assert capsys.readouterr().out == out
    assert not llm.engine.requests


def test_items_with_tools_are_encoded_or_fail_alone(llm: LLM, golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The golden tokenizer has no chat tokens: the chat fails, its neighbour is answered."""
    from di_jax.evaluation.tasks import EvalItem

    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    items = [
        EvalItem("a", "t", "x", messages=({"role": "user", "content": "hi"},), tools=(tool,)),
        EvalItem("b", "t", "x", prompt="The river"),
    ]
    params = SamplingParams(temperature=0.0, max_tokens=2)
    a, b = list(command.generate_samples(llm, items, params))
    assert a.item.id == "a" and a.error is not None and "lacks the chat token" in a.error["message"]
    assert b.item.id == "b" and b.error is None and len(b.token_ids) == 2

    demo = StandIn({})
    demo.folder = Path(__file__).parent.parent / "di_jax" / "checkpoint" / "demo_data"
    from di_jax.chat import ChatEncoder

    ids = ChatEncoder(demo.folder).encode(items[0].messages or (), items[0].tools)
    without = ChatEncoder(demo.folder).encode(items[0].messages or ())
    demo.answers = {str(ids): ["x"]}
    (sample,) = command.generate_samples(demo, items[:1], params)  # type: ignore[arg-type]
    assert sample.text == "x" and demo.asked[0][0] == {"prompt_token_ids": ids} and ids != without


# The picture --------------------------------------------------------------------------------------------------------


def test_scores_can_be_drawn(evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = evaluate(StandIn(RIGHT_AND_WRONG), "--json")
    whole, plain, other = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "other.json"
    whole.write_text(out)
    plain.write_text(json.dumps({"tasks": {"copy": {"n": 4, "score": 0.25, "metric": "exact"}}}))
    assert plot_eval.main([str(whole)]) == 0
    assert whole.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    picture = tmp_path / "both.png"
    assert plot_eval.main([str(whole), str(plain), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines() == [str(whole.with_suffix(".png")), str(picture)]
    for text, words in (
        ("", "other.json"),
        ("[]", "tasks missing"),
        ('{"tasks": {}}', "tasks missing"),
        ('{"tasks": {"a": {"n": 1}}}', "task a lacks n, score or metric"),
    ):
        other.write_text(text)
        assert plot_eval.main([str(other)]) == 2
        assert words in capsys.readouterr().err
