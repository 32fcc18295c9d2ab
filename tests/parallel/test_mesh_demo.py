"""The bundled checkpoint on a mesh answers what it answers on one device, a prompt of 3,000 tokens included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from di_jax.commands.generate import output_record, readable, summary_of
from di_jax.commands.records import read_records
from di_jax.config import load_config
from di_jax.llm import LLM
from di_jax.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(4, 2, 4), (8, 1, 8)], ids=["ep4dp4cp2", "ep8dp8"])
def test_the_demo_prints_the_same(mesh: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the README's block, which `tests/test_demo_answers.py` holds one device to."""
    monkeypatch.setenv("COLUMNS", "100")
    settings = [f"mesh.{name}={size}" for name, size in zip(("dp", "cp", "ep"), mesh, strict=True)]
    settings += ["engine.max_num_seqs=2", "engine.prefill_buckets=[512]", "engine.decode_buckets=[2]"]
    settings += ["engine.context_buckets=[4096]", "cache.compile_dir=null"]
    block = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    records = read_records(ROOT / "configs" / "demo.jsonl")
    with LLM(load_config("quickstart", settings)) as llm:
        assert len(llm.engine.scheduler.ledgers) == 8
        outputs = llm.generate([r.prompt for r in records], SamplingParams.from_dict({}, llm.config.sampling))
    results = [output_record(record.id, output) for record, output in zip(records, outputs, strict=True)]
    printed = readable(records, results, summary_of(results, 1.0, 0))

    def without_times(text: str) -> list[str]:
        return re.sub(r"[\d,]+\.\d+ (s\b|tokens/s)", r"# \1", text.strip("\n")).splitlines()

    assert without_times(printed) == without_times(block[1])
