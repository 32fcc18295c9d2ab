"""The README stays true: its commands parse, its configs resolve, its numbers are those of the committed results."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from di_jax.config import load_config
from di_jax.run import OPTIONS, parse_arguments

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"^    (python .*)$", README, re.MULTILINE)]


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-m di_jax.run" in c])
def test_commands_parse_and_their_configs_resolve(command: str) -> None:
    words = shlex.split(command)
    args = parse_arguments(words[words.index("di_jax.run") + 1 :])
    overrides = [*args.set, *([f"command={args.command}"] if args.command else [])]
    config = load_config(args.config, overrides)
    assert config.command in OPTIONS


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python scripts/")])
def test_scripts_and_their_files_exist(command: str) -> None:
    for word in shlex.split(command)[1:]:
        if not word.startswith("-"):
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-m scripts." in c])
def test_script_modules_have_the_options_that_are_shown(command: str) -> None:
    words = shlex.split(command)
    module = words[words.index("-m") + 1]
    path = ROOT / module.replace(".", "/")
    source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    for option in (word for word in words if word.startswith("--")):
        assert f'"{option}"' in source, option


GATES = {
    "copy": 0.95,
    "calc": 0.95,
    "sort": 0.9,
    "json": 0.9,
    "recall_256": 0.95,
    "recall_2048": 0.9,
    "recall_4096": 0.9,
}


def test_the_demo_table_quotes_the_committed_results() -> None:
    match = re.search(r"<!-- demo table: (\S+), (\S+) -->\n(.*?)<!-- end of demo table -->", README, re.DOTALL)
    assert match is not None
    evaluated, draft = (json.loads((ROOT / name).read_text(encoding="utf-8")) for name in (match[1], match[2]))
    names = {"copy": "copy", "reverse": "reverse", "sort": "sort", "calc": "sums and differences", "fact": "facts"}
    names |= {"json": "JSON from a sentence", "chat": "chat turns", "tool": "tool calls in DSML"}
    names |= {f"recall_{d}": f"recall over {d:,} tokens" for d in (256, 512, 1024, 2048, 4096)}
    assert {task: found["gate"] for task, found in evaluated["tasks"].items() if found["gate"] is not None} == GATES

    def row(found: str, gate: str = "", met: bool | None = None) -> list[str]:
        return [found, gate, "" if met is None else "yes" if met else "no"]

    want = {}
    for task, label in names.items():
        found = evaluated["tasks"][task]
        gate = GATES.get(task)
        want[label] = row(
            f"{found['score']:.0%}", f"{gate:.0%}" if gate else "", found["score"] >= gate if gate else None
        )
    perplexity, drafts = evaluated["perplexity"], draft["accepted_drafts"]
    five_gram, error = perplexity["english_five_gram_kneser_ney"], draft["calibration_error"]["after"]["all"]
    rise = perplexity["english"] / perplexity["english_masters"] - 1
    length = {kind: 1 + found["sampled"] for kind, found in drafts.items()}
    want |= {
        "English perplexity": row(
            f"{perplexity['english']:.2f}", f"{five_gram:.2f}, 5-gram Kneser-Ney", perplexity["english"] < five_gram
        ),
        "its rise by quantization": row(f"{rise:.1%}", "3%", rise <= 0.03),
        "tokens of a draft block, text": row(f"{length['text']:.2f}"),
        "tokens of a draft block, answers": row(f"{length['answers']:.2f}"),
        "tokens of a draft block, all": row(f"{length['all']:.2f}", "2.50", length["all"] >= 2.5),
        "calibration error of the survival": row(f"{error:.1%}", "3%", error <= 0.03),
    }
    lines = [line.strip("|").split("|") for line in match[3].splitlines() if line.startswith("|")][2:]
    assert {label.strip(): [cell.strip() for cell in cells] for label, *cells in lines} == want
    assert ("All gates are met but the draft's in greedy tokens" in README) == all(
        met != "no" for *_, met in want.values()
    )
    told = " ".join(README.split())
    alone = {kind: found["sampled"] for kind, found in drafts.items()}
    assert f"{alone['all']:.2f} are accepted: {alone['text']:.2f} in text, {alone['answers']:.2f} in answers" in told
    assert f"drawn greedily it is {1 + drafts['all']['greedy']:.2f} tokens" in told


def test_the_replay_table_quotes_the_committed_results() -> None:
    match = re.search(r"<!-- replay table: (\S+) -->\n(.*?)<!-- end of replay table -->", README, re.DOTALL)
    assert match is not None
    quoted = re.findall(r"^\| (off|mask|compact) \| (.+) \|$", match[2], re.MULTILINE)
    committed = {
        row["replay_decoder"]: [f"{row[f'{text}_perplexity']:.4f}" for text in ("english", "python")]
        + [f"{row[f'recall_{distance}']:.0%}" for distance in (256, 1024, 4096)]
        for row in json.loads((ROOT / match[1]).read_text(encoding="utf-8"))["rows"]
    }
    assert {mode: cells.split(" | ") for mode, cells in quoted} == committed and len(committed) == 3


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert "://" in target or (ROOT / target).exists(), target


def test_the_performance_table_quotes_the_committed_rows() -> None:
    match = re.search(r"<!-- performance table: (\S+) -->\n(.*?)<!-- end of performance table -->", README, re.DOTALL)
    assert match is not None
    result = json.loads((ROOT / match[1]).read_text(encoding="utf-8"))
    rows = [line for line in match[2].splitlines() if re.match(r"\| (prefill|decode) ", line)]
    latest = max(row["date"] for row in result["rows"])
    committed = {(r["phase"], r["batch"]): r for r in result["rows"] if r["date"] == latest}
    assert len(rows) == len(committed) > 0
    for line in rows:
        phase, batch, speed, step = [cell.strip() for cell in line.strip("|").split("|")][:4]
        row = committed[phase, int(batch)]
        assert float(speed.replace(",", "")) == pytest.approx(row["tokens_per_s"], rel=0.01), line
        assert float(step) == pytest.approx(row["step_ms"], rel=0.01), line


def test_the_host_table_quotes_the_committed_results() -> None:
    match = re.search(r"<!-- host table: (\S+) -->\n(.*?)<!-- end of host table -->", README, re.DOTALL)
    assert match is not None
    rows = json.loads((ROOT / match[1]).read_text(encoding="utf-8"))["rows"]
    newest = {
        (row["batch"], row.get("num_draft_tokens", 0)): row
        for row in rows
        if (row["phase"], row["max_model_len"]) == ("decode", 4096)
    }
    batches, names = sorted({batch for batch, _ in newest}), ("schedule_us", "post_us", "host_us")
    want = [
        [str(batch), *(f"{newest[batch, drafts][name]:,.0f} us" for drafts in (0, 5) for name in names)]
        for batch in batches
    ]
    assert table_rows(match[2]) == want and batches == [1, 16, 64, 256]
    told = " ".join(README.split())
    assert "Without drafts it keeps to the 300 us that 256 requests may take" in told
    assert newest[256, 0]["host_us"] < newest[256, 0]["budget_us"] == 300 < newest[256, 5]["host_us"]


def table_rows(text: str) -> list[list[str]]:
    """The cells of a table's rows that begin with a number."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| \d", line)]


def test_the_simulation_table_quotes_the_committed_results() -> None:
    match = re.search(r"<!-- simulation table: (\S+) -->\n(.*?)<!-- end of simulation table -->", README, re.DOTALL)
    assert match is not None
    rows = json.loads((ROOT / match[1]).read_text(encoding="utf-8"))["rows"]
    newest = {row["batch"]: row for row in rows if "gain" in row and row["max_model_len"] == 4096}
    lengths = ("verified_length", "accepted_length", "fixed_accepted_length")
    want = [
        [
            str(batch),
            *(f"{row[name]:.2f}" for name in lengths),
            f"{row['simulated_step_ms']:.1f} ms",
            f"{row['gain']:.1%}",
        ]
        for batch, row in sorted(newest.items())
    ]
    assert table_rows(match[2]) == want and len(want) == 4
    told = " ".join(README.split())
    script = json.loads((ROOT / "scripts/results/speculation-simulator.json").read_text(encoding="utf-8"))["rows"]
    gain = {(row["arm"], row["requests"]): f"{row['gain']:.0%}" for row in script}
    assert f"It gains {gain['engine', 60]} at 60 requests and {gain['engine', 96]} at 96" in told
    assert f"and {gain['engine', 256]} at 256" in told and f"would make {gain['any_rows', 256]}" in told


def test_the_speculation_tables_quote_the_committed_results() -> None:
    pattern = r"<!-- speculation table: (\S+) -->\n(.*?)<!-- end of speculation table -->"
    tables = re.findall(pattern, README, re.DOTALL)
    assert [Path(name).stem for name, _ in tables] == ["speculation-nvidia-h200", "speculation-cpu"]
    for name, text in tables:
        result = json.loads((ROOT / name).read_text(encoding="utf-8"))
        speed = {(row["concurrency"], row["mode"]): row["tokens_per_s"] for row in result["rows"]}
        ratio = {(r["concurrency"], r["of"], r["over"]): r["median"] for r in result["ratios"]}
        quoted = re.findall(r"^\| (\d+) \| (.+) \|$", text, re.MULTILINE)
        assert [int(requests) for requests, _ in quoted] == sorted({requests for requests, _ in speed})
        for requests, cells in quoted:
            n, told = int(requests), [cell.strip().replace(",", "") for cell in cells.split("|")]
            want = [f"{speed[n, mode]:.0f}" for mode in ("none", "fixed", "varlen")]
            assert told == [*want, *(f"{ratio[n, 'varlen', other]:.2f}" for other in ("fixed", "none"))]


def test_the_slice_table_quotes_the_committed_results() -> None:
    match = re.search(r"<!-- slice table -->\n(.*?)<!-- end of slice table -->", README, re.DOTALL)
    assert match is not None
    path = ROOT / "scripts" / "results" / "slice-nvidia-h200.json"
    kernels = ("mHC", "index", "attention", "stores")
    labels = ("XLA", *("+".join(kernels[: n + 1]) for n in range(len(kernels))))
    want: dict[tuple[str, str], list[str]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        size = row["batch"] if row["phase"] == "decode" else row["rows"]
        cells = want.setdefault((f"{row['phase']} EP{row['ep']}", str(size)), [""] * 6)
        cells[labels.index(row["label"])] = f"{row['step_ms']:.0f} ms {row['tokens_per_s']:.0f}"
        cells[5] = f"{row['roofline_ms']:.1f} ms"
    lines = re.findall(r"^\| ((?:decode|prefill).*) \|$", match[1].replace(",", ""), re.MULTILINE)
    quoted = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert {(step, size): cells for step, size, *cells in quoted} == want


def test_plans_are_near_what_the_compiler_places() -> None:
    """The README's figures, and within 15% of `memory_analysis` in the newest row of every label and size."""
    path = ROOT / "scripts" / "results" / "slice-nvidia-h200.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    newest = {(row["phase"], row["label"], row["ep"], row["rows"]): row["plan"]["over_memory_analysis"] for row in rows}
    assert all(abs(ratio - 1) <= 0.15 for ratio in newest.values())
    kernels, plain = (
        [ratio for (_, label, *_), ratio in newest.items() if label == own]
        for own in ("mHC+index+attention+stores", "XLA")
    )
    told = f"{min(kernels):.2f} to {max(kernels):.2f} of the compiler's analysis with all kernels"
    assert f"{told}, and {min(plain):.2f} to {max(plain):.2f} with plain XLA" in " ".join(README.split())


def test_the_kernel_check_that_the_readme_tells_of_passed() -> None:
    check = json.loads((ROOT / "scripts/results/kernel-check-nvidia-h200.json").read_text(encoding="utf-8"))
    assert check["passed"] and all(not check[name]["problems"] for name in ("goldens", "layers", "demo", "engine"))
    plain, together = (check["layers"]["results"][name]["prefill"]["median"] for name in ("reference", "all"))
    engines = check["engine"]["results"]
    assert all(engine["best_same"] == 1 and engine["answers_same"] == 6 for engine in engines.values())
    bare = engines.pop("reference")["median"]
    least, most = (find(engine["median"] for engine in engines.values()) for find in (min, max))
    told = " ".join(README.split())
    same, kept = (check["layers"]["results"][name]["prefill"]["argmax_same"] for name in ("reference", "all"))
    for words in (
        f"the same in {same:.0%} of a prefill's rows ({kept:.0%} with the kernels)",
        f"logits are {plain:.3f} from it in the median with plain XLA in bfloat16, {together:.3f} with all four",
        f"the log-probabilities of their {check['engine']['tokens']} greedy tokens",
        f"off by {least:.3f} to {most:.3f} in the median, with plain XLA by {bare:.3f}",
    ):
        assert words in told, words


def test_the_kernel_table_quotes_the_committed_results() -> None:
    match = re.search(r"<!-- kernel table -->\n(.*?)<!-- end of kernel table -->", README, re.DOTALL)
    assert match is not None
    lines = re.findall(r"^\|(.+\d) \|$", match[1].replace(",", ""), re.MULTILINE)
    quoted = [[cell.strip() for cell in line.split("|")[1:]] for line in lines]
    want = []
    for name, workload, most in (  # microseconds: the first targets
        ("sparse-attention", "decode, 256 rows", 120),
        ("sparse-attention", "prefill, 8,192 rows", 2749),  # 687 GFLOP at 250 TFLOP/s
        ("index-topk", "decode, 64 rows x 65,536", 250),
        ("hyper-connections", "site, 256 rows", 35),
        ("compress-store", "source of ratio 2, 256 rows", 20),
    ):
        path = ROOT / "scripts" / "results" / f"kernel-{name}-nvidia-h200.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        row = next(row for row in rows if row["workload"] == workload)
        kernel = row["us"] if "us" in row else row["mosaic_gpu_sm90"]["us"]
        assert kernel <= most, workload
        peers = [peer["us"] for peer in row.get("peers", []) if "us" in peer]
        best = f"{min(peers):.1f}" if peers else ""
        want.append([f"{kernel:.1f}", f"{row['reference']['us']:.1f}", best, f"{row['floor_us']:.1f}"])
        if "prefill" in workload:
            assert f"{row['mosaic_gpu_sm90']['tflop_per_s']:.0f} TFLOP/s" in match[1]
    assert quoted == want


def test_the_gain_of_splits_is_as_committed_and_as_tuned() -> None:
    """Of the GPU's time by kernel; `split_tiles` names the fastest of every number of rows that was measured."""
    result = json.loads((ROOT / "scripts/results/kernel-sparse-attention-nvidia-h200.json").read_text(encoding="utf-8"))
    tuned = json.loads((ROOT / "kernels_pallas/sparse_attention/tuned/nvidia-h200.json").read_text(encoding="utf-8"))
    found: dict[int, list[tuple[float, int, int]]] = {}
    for row in result["splits"]["rows"]:
        if "window" not in row["workload"]:
            rows = int(row["workload"].split()[1])
            found.setdefault(rows, []).append((sum(row["kernels_us"].values()), row["splits"], row["split_tiles"]))
    assert sorted(found) == [8, 16, 32, 64, 96]
    told = " ".join(README.split())
    for rows, times in found.items():
        whole, (least, splits, tiles) = next(us for us, number, _ in times if number == 1), min(times)
        chosen = next((each for limit, each in tuned["split_tiles"] if rows <= limit), None)
        assert chosen == (tiles if splits > 1 else None), rows
        assert rows not in (8, 32, 64) or re.search(rf"{least:.0f} (us )?in place of {whole:.0f} for {rows} ", told)
