"""The offline API on the golden tiny model."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from di_jax.config import Config
from di_jax.errors import UserError
from di_jax.llm import LLM, Prompt, RequestOutput, SamplingParams

PROMPTS = ("p7", "p64", "p150", "p300")


@pytest.fixture(scope="module")
def goldens(golden: Path) -> dict[str, np.ndarray]:
    return load_file(golden / "tiny-v41.kvq.safetensors")


@pytest.fixture(autouse=True)
def nothing_is_held(llm: LLM) -> Any:
    """Every test leaves all blocks and slots free."""
    yield
    engine = llm.engine
    engine.scheduler.check()
    assert engine.scheduler.ledgers[0].num_free_blocks == engine.scheduler.ledgers[0].num_blocks
    assert engine.scheduler.ledgers[0].num_free_slots == engine.scheduler.ledgers[0].num_slots
    assert not engine.requests


def answer(output: RequestOutput) -> list[int]:
    assert output.error is None
    return output.outputs[0].token_ids


def test_greedy_answers_equal_the_goldens(llm: LLM, goldens: dict[str, np.ndarray]) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts: list[Prompt] = [{"prompt_token_ids": goldens[f"{p}/input_ids"]} for p in PROMPTS]
    compared = 0
    for name, output in zip(PROMPTS, llm.generate(prompts, params), strict=True):
        close = np.flatnonzero(goldens[f"{name}/greedy_margin"] < 1e-4)
        sure = int(close[0]) if close.size else 32
        assert answer(output)[:sure] == goldens[f"{name}/greedy_ids"][:sure].tolist()
        compared += sure
        assert output.prompt_token_ids == goldens[f"{name}/input_ids"].tolist()
        assert (output.prompt, output.finished, output.outputs[0].finish_reason) == (None, True, "length")
    assert compared == 4 * 32  # the smallest margin of these goldens is 0.027


def test_one_bad_prompt_in_eight(llm: LLM) -> None:
    prompts: list[Prompt] = [f"number {n} of eight" for n in range(8)]
    alone = llm.generate(prompts[:1])[0]
    prompts[3] = {"prompt_token_ids": [5, 5000]}
    outputs = llm.generate(prompts)
    assert [output.index for output in outputs] == list(range(8))
    assert [output.error is None for output in outputs] == [n != 3 for n in range(8)]
    assert outputs[3].error is not None
    assert outputs[3].error["type"] == "invalid_request" and "5000 is not a token id" in outputs[3].error["message"]
    assert (outputs[3].outputs, outputs[3].finished, outputs[3].metrics) == ([], True, None)
    assert answer(outputs[0]) == answer(alone) and len({o.request_id for o in outputs}) == 8
    assert all(len(answer(o)) == 8 for n, o in enumerate(outputs) if n != 3)


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ("", {}, "prompt: is empty"),
        ({"prompt": ""}, {}, "prompt: is empty"),
        ({"prompt_token_ids": []}, {}, "prompt: is empty"),
        ("x" * 2000, {}, "engine.max_model_len = 384"),
        ("half \ud800", {}, "not valid Unicode"),
        ({"prompt": 5}, {}, "prompt: expected text, found int"),
        ({"prompt_token_ids": "5 6"}, {}, "prompt_token_ids: expected a list, found str"),
        ({"prompt_token_ids": [5, 6.5]}, {}, "prompt_token_ids[1]: 6.5"),
        ({"prompt_token_ids": [5, -1]}, {}, "prompt_token_ids[1]: -1"),
        ({"messages": {"role": "user"}}, {}, "messages: expected a list, found dict"),
        ({"messages": [{"role": "user", "content": "hi"}]}, {}, "<｜User｜>"),
        ({"prompt": "a", "prompt_token_ids": [5]}, {}, "found prompt, prompt_token_ids"),
        ({"promt": "a"}, {}, "expected a text or one of prompt, prompt_token_ids, messages; found promt"),
        ({}, {}, "found nothing"),
        (5, {}, "found int"),
        ("ok", {"top_p": 1.5}, "sampling.top_p: 1.5 is out of range"),
        ("ok", {"prompt_logprobs": 1}, "sampling.prompt_logprobs: 1 is not available yet"),
        ("ok", {"logit_bias": {"512": 1}}, "sampling.logit_bias[0]: 512"),
        ("ok", {"allowed_token_ids": [5, 512]}, "sampling.allowed_token_ids[1]: 512"),
        ("ok", {"temprature": 0.5}, "the nearest known key is sampling.temperature"),
        ("ok", {"max_tokens": 0}, "sampling.max_tokens"),
        ("ok", {"stop_token_ids": [512]}, "sampling.stop_token_ids[0]: 512"),
        ("ok", "greedy", "sampling: expected an object"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_and_the_others_answered(
    llm: LLM, prompt: Any, sampling: Any, words: str
) -> None:
    bad, good = llm.generate([prompt, "fine"], [sampling, {}])
    assert bad.error is not None and words in bad.error["message"], bad.error
    assert len(answer(good)) == 8


def test_parameters_are_one_for_all_or_one_each(llm: LLM) -> None:
    assert [len(answer(o)) for o in llm.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=3))] == [3, 3]
    assert [len(answer(o)) for o in llm.generate(["a", "b"], [{"max_tokens": 2}, {"max_tokens": 5}])] == [2, 5]
    assert [len(answer(o)) for o in llm.generate("a")] == [8]
    assert llm.generate([]) == []
    for call in (llm.generate, llm.stream, llm.generate_iter):
        with pytest.raises(UserError, match="sampling_params: 1 for 2 prompts"):
            call(["a", "b"], [SamplingParams()])


def test_seeds_reproduce_whatever_the_companions(llm: LLM) -> None:
    hot = {"temperature": 1, "max_tokens": 24, "ignore_eos": True}
    first = llm.generate("Once upon", {**hot, "seq_seed": 11})[0]
    assert first.seq_seed == 11
    others: list[Prompt] = [f"companion {n} " * (n + 1) for n in range(9)]
    crowd = llm.generate(["Once upon", *others], [{**hot, "seq_seed": 11}, *({**hot, "seq_seed": n} for n in range(9))])
    assert answer(crowd[0]) == answer(first)
    assert answer(llm.generate("Once upon", {**hot, "seq_seed": 12})[0]) != answer(first)
    drawn = llm.generate("Once upon", hot)[0]
    assert drawn.seq_seed is not None
    assert answer(llm.generate("Once upon", {**hot, "seq_seed": drawn.seq_seed})[0]) == answer(drawn)
    assert answer(drawn) != answer(first)


def test_n_answers_differ_and_the_first_is_that_of_one(llm: LLM) -> None:
    hot = {"temperature": 1, "max_tokens": 16, "seq_seed": 3, "ignore_eos": True}
    output = llm.generate("Once upon", {**hot, "n": 3})[0]
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 3
    assert output.outputs[0].token_ids == answer(llm.generate("Once upon", hot)[0])
    again = llm.generate("Once upon", {**hot, "n": 3})[0]
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in output.outputs]
    greedy = llm.generate("Once upon", {"n": 2})[0]
    assert greedy.outputs[0].token_ids == greedy.outputs[1].token_ids


def test_text_and_stops(llm: LLM, goldens: dict[str, np.ndarray]) -> None:
    prompt: Prompt = {"prompt_token_ids": goldens["p300/input_ids"].tolist()}
    eos = llm.tokenizer.eos_id
    base = {"max_tokens": 32, "ignore_eos": True}
    whole = llm.generate(prompt, base)[0].outputs[0]
    assert whole.text == llm.tokenizer.decode(whole.token_ids)
    spelled = llm.generate(prompt, {**base, "skip_special_tokens": False})[0].outputs[0]
    assert spelled.text == llm.tokenizer.decode(whole.token_ids, skip_special_tokens=False) != whole.text
    assert llm.generate(prompt, {**base, "detokenize": False})[0].outputs[0].text == ""
    # A stop text that begins inside one token and ends inside another.
    start = whole.text.index("wn")
    stop = whole.text[start + 1 : start + 6]
    cut = llm.generate(prompt, {**base, "stop": ["never", stop]})[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[: start + 1], "stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and len(cut.token_ids) < 32
    kept = llm.generate(prompt, {**base, "stop": stop, "include_stop_str_in_output": True})[0].outputs[0]
    assert kept.text == whole.text[: start + 6] and kept.token_ids == cut.token_ids
    # The id that ends an answer is among its ids; its text only when asked for.
    third = whole.token_ids[3]
    by_id = llm.generate(prompt, {**base, "stop_token_ids": [third]})[0].outputs[0]
    assert by_id.token_ids == whole.token_ids[:4] and by_id.text == llm.tokenizer.decode(whole.token_ids[:3])
    shown = {**base, "stop_token_ids": [third], "include_stop_str_in_output": True}
    assert llm.generate(prompt, shown)[0].outputs[0].text == llm.tokenizer.decode(whole.token_ids[:4])
    ended = llm.generate(prompt, {"max_tokens": 32})[0].outputs[0]
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(eos) + 1] and ended.token_ids[-1] == eos
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert ended.cumulative_logprob < 0


def test_a_stream_grows_to_the_answer(llm: LLM) -> None:
    prompts: list[Prompt] = ["The river", "", "A longer text than the other one"]
    whole = llm.generate(prompts, {"n": 2, "temperature": 1, "seq_seed": 5, "ignore_eos": True})
    seen: dict[int, list[RequestOutput]] = {0: [], 1: [], 2: []}
    for output in llm.stream(prompts, {"n": 2, "temperature": 1, "seq_seed": 5, "ignore_eos": True}):
        seen[output.index].append(output)
    assert len(seen[1]) == 1 and seen[1][0].error is not None and seen[1][0].finished
    for index in (0, 2):
        outputs = seen[index]
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        for before, after in itertools.pairwise(outputs):
            for old, new in zip(before.outputs, after.outputs, strict=True):
                assert new.token_ids[: len(old.token_ids)] == old.token_ids and new.text.startswith(old.text)
            assert sum(len(o.token_ids) for o in after.outputs) > sum(len(o.token_ids) for o in before.outputs)
        assert len(outputs[0].outputs[0].token_ids) == 1
        assert [o.text for o in outputs[-1].outputs] == [o.text for o in whole[index].outputs]


def test_a_closed_stream_aborts_the_rest_and_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(["one", "two"] * 6, {"max_tokens": 200})
    next(stream)
    held = llm.engine.scheduler.ledgers[0].num_blocks - llm.engine.scheduler.ledgers[0].num_free_blocks
    assert held > 0 and len(llm.engine.requests) == 12
    stream.close()
    (ledger,) = llm.engine.scheduler.ledgers
    assert not llm.engine.requests and ledger.num_free_blocks == ledger.num_blocks
    assert len(answer(llm.generate("one")[0])) == 8


def test_a_stream_may_be_interleaved_with_other_calls(llm: LLM) -> None:
    want = answer(llm.generate("The river", {"max_tokens": 12, "ignore_eos": True})[0])
    stream = llm.stream("The river", {"max_tokens": 12, "ignore_eos": True})
    next(stream)
    other = llm.generate("Something else", {"max_tokens": 20, "ignore_eos": True})[0]
    assert len(answer(other)) == 20
    last = list(stream)[-1]
    assert last.finished and answer(last) == want


def test_an_interrupt_frees_everything_and_goes_on_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    step = llm.engine.step

    def interrupted() -> Any:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], {"max_tokens": 100})
    monkeypatch.undo()
    assert not llm.engine.requests
    assert len(answer(llm.generate("one")[0])) == 8


def test_an_interrupt_inside_a_step_costs_the_running_answers_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the donation of the caches and their return: what they held is gone, the engine is not."""
    want = [answer(output) for output in llm.generate(["one", "two"])]
    stream = llm.stream("The river", {"max_tokens": 100, "ignore_eos": True})
    next(stream)
    compiled = llm.engine.parts.runner._compiled

    def interrupted(executable: Any) -> Any:
        def call(*arguments: Any) -> Any:
            executable(*arguments)
            raise KeyboardInterrupt

        return call

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for key, executable in list(compiled.items()):
            patch.setitem(compiled, key, interrupted(executable))
        llm.generate(["one", "two"])
    assert not llm.engine.requests
    (last,) = stream
    assert last.finished and last.error is not None and last.error["type"] == "interrupted"
    assert [answer(output) for output in llm.generate(["one", "two"])] == want


def test_an_interrupt_while_queueing_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    add_request, count = llm.engine.add_request, itertools.count()

    def interrupted(*arguments: Any) -> Any:
        add_request(*arguments)
        if next(count) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two", "three", "four"])
    assert not llm.engine.requests and not llm.engine.has_unfinished


def test_a_stream_ends_when_its_engine_goes(llm: LLM, tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("di_jax.llm.build_engine_parts", lambda config: llm.engine.parts)
    short = LLM(tiny_config)
    begun, untouched = short.stream(["one", "two"], {"max_tokens": 100}), short.stream("three")
    next(begun)
    short.shutdown()
    rest = list(begun)
    assert sorted(o.index for o in rest) == [0, 1]
    assert all(o.finished and o.outputs[0].finish_reason == "abort" for o in rest)
    with pytest.raises(UserError, match="shut down"):
        next(untouched)


def test_a_stream_ends_when_its_request_is_aborted(llm: LLM) -> None:
    stream = llm.stream(["one", "two"], {"max_tokens": 6, "ignore_eos": True})
    first = next(stream)
    llm.engine.abort(first.request_id)
    rest = list(stream)
    assert [o.outputs[0].finish_reason for o in rest if o.index == first.index] == ["abort"]
    assert len(answer(rest[-1])) == 6 and rest[-1].index != first.index
    alone = llm.stream("one", {"max_tokens": 6, "ignore_eos": True})
    llm.engine.abort(next(alone).request_id)
    assert [o.outputs[0].finish_reason for o in alone] == ["abort"]


def test_an_engine_without_work_does_not_spin(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine, "step", lambda: None)
    with pytest.raises(RuntimeError, match=r"nothing to do, requests \d+ are open"):
        next(llm.stream("one"))


def test_a_stream_speaks_only_of_what_is_new(llm: LLM) -> None:
    """Steps of another call, of which most did nothing for it, count as well."""
    counts = []
    for output in llm.stream("one", {"max_tokens": 5, "ignore_eos": True}):
        counts.append(len(answer(output)))
        llm.generate({"prompt_token_ids": [5] * 150}, {"max_tokens": 1})
    assert counts == sorted(set(counts)) and counts[-1] == 5


def test_prompts_and_parameters_may_come_from_generators(llm: LLM) -> None:
    prompts, lengths = ["a", "b", "c"], [2, 5, 3]
    outputs = llm.generate(iter(prompts), [{"max_tokens": n, "ignore_eos": True} for n in lengths])
    assert [len(answer(o)) for o in outputs] == lengths
    outputs = llm.generate((p for p in prompts), ({"max_tokens": n, "ignore_eos": True} for n in lengths))
    assert [len(answer(o)) for o in outputs] == lengths
    assert len(llm.generate(p for p in prompts)) == 3
    with pytest.raises(UserError, match="sampling_params: 2 for 3 prompts"):
        llm.generate((p for p in prompts), iter([{}, {}]))


def test_numpy_integers_are_prompt_ids(llm: LLM) -> None:
    output = llm.generate({"prompt_token_ids": [np.int32(5), np.int64(6)]})[0]
    assert output.prompt_token_ids == [5, 6] and json.dumps(output.prompt_token_ids) == "[5, 6]"


def test_progress_goes_to_a_terminal_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        llm.generate(["one", ""])
        assert ("2/2" in stream.getvalue() and "out" in stream.getvalue()) is shown
    quiet = Terminal()
    monkeypatch.setattr("sys.stderr", quiet)
    llm.generate(["one"], use_tqdm=False)
    assert quiet.getvalue() == ""


def test_after_shutdown_it_says_so(tiny_config: Config) -> None:
    with LLM(tiny_config.with_values({"engine.warmup": False})) as short:
        assert short.engine.num_steps == 0
    short.shutdown()
    with pytest.raises(UserError, match="shut down"):
        short.generate("a")
