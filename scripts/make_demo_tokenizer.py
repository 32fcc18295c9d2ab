"""Makes the tokenizer and the config of the bundled demo checkpoint: di_jax/checkpoint/demo_data/.

    python scripts/make_demo_tokenizer.py            writes the files when there are none; refuses to change them
    python scripts/make_demo_tokenizer.py --check    compares with the bundled files, exit 1 on any difference
    python scripts/make_demo_tokenizer.py --force    replaces them (every cached demo checkpoint is then made anew)

A byte-level BPE of 2,000 merges, trained on the docstrings of this Python's standard library: no download, no foreign
text. The training is deterministic, the corpus follows the Python version; `provenance.json` holds both, so that a
difference is explained by one or the other.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from di_jax.model.config import ModelConfig  # noqa: E402  (the script runs from a checkout, installed or not)
from di_jax.model.engram_tables import bucket_primes, token_map  # noqa: E402

FOLDER = ROOT / "di_jax" / "checkpoint" / "demo_data"
MERGES = 2000
VOCAB_SIZE = 2304  # 2,275 tokens and spare rows up to a multiple of 128, as the release pads its embedding
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"  # ids 0, 1, 2
# Part of an answer's text: reasoning and tool calls are told apart by them.
VISIBLE = ("<think>", "</think>", "｜DSML｜")
MARKERS = (
    "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>", "<｜image｜>", "<｜ref｜>", "<｜/ref｜>",
    "<｜box｜>", "<｜/box｜>", "<｜point｜>", "<｜/point｜>", "<｜polygon｜>", "<｜/polygon｜>",
)  # fmt: skip


def docstrings() -> Iterator[str]:
    """Docstrings of the standard library's modules in path order, tests and generated tables left out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "pydoc_data", "__pycache__", "lib2to3"}
    paths = [p for p in library.rglob("*.py") if not skip & set(p.relative_to(library).parts)]
    for path in tqdm(sorted(paths), desc="reading docstrings", unit="file", disable=None):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a few files hold wrong syntax on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if text := ast.get_docstring(node):
                    yield text


def train(corpus: list[str]) -> RawTokenizer:
    """Byte-level BPE: ids 0..2 bos, eos and pad, then 256 bytes, the merges, and the chat tokens at the end."""
    tokenizer = RawTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3 + 256 + MERGES,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer, length=len(corpus))
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in MARKERS])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in VISIBLE])
    return tokenizer


def model_config(tokenizer: RawTokenizer) -> dict[str, Any]:
    """The released architecture scaled down, with every kind of layer: window only (0, 1), pooled KV sources that
    others reuse (2, 4), the candidate source at ratio 1 (6), layers that pick anew among its candidates (8, 10), and
    Engrams on a window layer and on a KV source (1, 4)."""
    raw: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": None,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "deepseek_v41_text",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 192,
            "moe_intermediate_size": 96,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "qk_rope_head_dim": 16,
            "q_lora_rank": 96,
            "o_lora_rank": 32,
            "o_groups": 4,
            "hidden_act": "silu",
            "swiglu_limit": 10.0,
            "rms_norm_eps": 1e-20,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "max_position_embeddings": 65536,
            "rope_theta": 10000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 4096,
            },
            "compress_rope_theta": 160000,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "sliding_window": 64,
            "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0],
            "kv_source_layer_ids": [2, 4, 6],
            "index_source_layer_ids": [2, 4, 6, 8, 10],
            "index_n_heads": 8,
            "index_head_dim": 32,
            "index_topk": 64,
            "candidate_source_layer_id": 6,
            "candidate_topk_blocks": 32,
            "candidate_block_size": 8,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-06,
            "engram_layer_ids": [1, 4],
            "engram_num_embeddings": [0, 0],
            "engram_max_ngram_size": 4,
            "engram_vocab_size": 2000,
            "engram_n_heads": 4,
            "engram_head_dim": 32,
            "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": int(token_map(tokenizer, VOCAB_SIZE).max()) + 1,
            "num_nextn_predict_layers": 2,
            "dspark_block_size": 5,
            "dspark_noise_token_id": VOCAB_SIZE - 1,
            "dspark_target_layer_ids": [9, 10, 11],
            "dspark_markov_rank": 32,
            "dspark_n_routed_experts": 8,
            "dspark_num_experts_per_tok": 2,
        },
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }
    rows = bucket_primes(ModelConfig.from_dict(raw)).sum(axis=(1, 2))
    raw["text_config"]["engram_num_embeddings"] = rows.tolist()
    return raw


def make() -> dict[str, str]:
    """File name -> content of everything bundled."""
    corpus = list(docstrings())
    tokenizer = train(corpus)
    if (found := tokenizer.get_vocab_size()) > VOCAB_SIZE:
        raise SystemExit(f"the tokenizer has {found} ids, VOCAB_SIZE is {VOCAB_SIZE}: raise it")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 65536,
    }
    provenance = {
        "script": "scripts/make_demo_tokenizer.py",
        "corpus": "docstrings of the Python standard library",
        "corpus_characters": sum(map(len, corpus)),
        "corpus_sha256": hashlib.sha256("\0".join(corpus).encode()).hexdigest(),
        "python": platform.python_version(),
        "tokenizers": version("tokenizers"),
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        **{
            name: json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            for name, content in (
                ("tokenizer_config.json", settings),
                ("config.json", model_config(tokenizer)),
                ("provenance.json", provenance),
            )
        },
    }


def differences(made: dict[str, str], folder: Path) -> list[str]:
    """One line per bundled file that is absent or not equal to `made`."""
    found = {name: (folder / name).read_text(encoding="utf-8") for name in made if (folder / name).is_file()}
    return [
        f"{folder / name}: {'differs' if name in found else 'is missing'}"
        for name, content in made.items()
        if found.get(name) != content
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the bundled files and write nothing")
    parser.add_argument("--force", action="store_true", help="replace bundled files that differ")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: the bundled data")
    options = parser.parse_args(arguments)
    made = make()
    lines = differences(made, options.folder)
    if not lines:
        print(f"{options.folder}: {len(made)} files are as this script makes them", file=sys.stderr)
        return 0
    present = any((options.folder / name).is_file() for name in made)
    if options.check or (present and not options.force):
        print("\n".join(lines), file=sys.stderr)
        provenance = options.folder / "provenance.json"
        if provenance.is_file():
            before, now = json.loads(provenance.read_text(encoding="utf-8")), json.loads(made["provenance.json"])
            for key in now:
                if before.get(key) != now[key]:
                    print(f"  {key}: {before.get(key)} there, {now[key]} here", file=sys.stderr)
        if not options.check:
            print("nothing written; --force replaces the files", file=sys.stderr)
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, content in made.items():
        (options.folder / name).write_text(content, encoding="utf-8")
        print(f"wrote {options.folder / name} ({len(content.encode()):,} B)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
