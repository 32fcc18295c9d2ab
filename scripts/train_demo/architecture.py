"""The demo model: every kind of layer that the release has, scaled down to fit in a repository."""

from __future__ import annotations

from typing import Any

from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import bucket_primes

BUDGET_BYTES = 24_000_000  # of the exported checkpoint


# In a trial: four layers, one window-only, one ratio-2 (Engram there) and two ratio-1, and one draft stage. On a CPU a
# step of training it compiles in 15 s instead of 60.
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "compress_ratios": [0, 2, 1, 1, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "index_n_heads": 2,
    "index_topk": 32,
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 16,
    "hc_sinkhorn_iters": 4,
    "engram_vocab_size": 300,
    "engram_layer_ids": [1],
    "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": [3],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}


def config_json(
    vocab_size: int, compressed_vocab_size: int, noise_token_id: int, *, small: bool = False
) -> dict[str, Any]:
    """The `config.json` of the demo model for a tokenizer of `vocab_size` ids; `small`: of a model to try training on.

    Twelve layers: two window-only (Engram at 1), three ratio-2 groups (Engram at 4), and a ratio-1 decoder half with
    the candidate source at 7 and Reindex layers at 9 and 11; three draft stages.
    """
    engram = {"engram_max_ngram_size": 4, "engram_n_heads": 4, "engram_vocab_size": 3000, "engram_layer_ids": [1, 4]}
    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "vocab_size": vocab_size,
        "hidden_size": 192,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 96,
        "o_lora_rank": 64,
        "o_groups": 4,
        "hidden_act": "silu",
        "moe_intermediate_size": 96,
        "n_routed_experts": 24,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 65536,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 64,
        "compress_ratios": [0, 0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4, 6, 7],
        "index_source_layer_ids": [2, 4, 6, 7, 9, 11],
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 7,
        "candidate_topk_blocks": 64,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        **engram,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": compressed_vocab_size,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": noise_token_id,
        "dspark_target_layer_ids": [9, 10, 11],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 3,
    }
    text |= SMALL if small else {}
    text["engram_num_embeddings"] = [0] * len(text["engram_layer_ids"])  # counted below: sums of each layer's primes
    raw = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": None,
        "tie_word_embeddings": False,
        "text_config": text,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }
    text["engram_num_embeddings"] = bucket_primes(ModelConfig.from_dict(raw)).sum(axis=(1, 2)).tolist()
    return raw
