"""Small random models with the configurations of published ones.

Each entry gives, in the words of that model's own config.json, what its architecture depends on
(normalisation, rotary embeddings and their scaling, biases, soft caps, windows, tying, experts).
Only sizes are shrunk: widths, heads (grouped as in the original), layers, vocabulary, experts, and
lengths (a window, the length before rope scaling), so that a short text exceeds them. Every
parameter is random, so that no norm, bias or sink can be left out without a change of the text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import toys
import transformers

from entmtp_calib.targets.network import quiet

VOCAB = 12
WINDOW = 12
MAX_POSITIONS = 96

# What no architecture depends on, but a small random model needs.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Published:
    """A configuration and how it is shrunk.

    Attributes:
        follows: the model on the hub whose config.json it is.
        config: what the architecture depends on, as published.
        shrunk: the sizes that replace published ones, beside `SIZES`.
        seed: of the weights; its texts have no near-ties and do not repeat one token.
        around: of a model that also sees: what stands around its text_config.
    """

    follows: str
    config: dict[str, Any]
    shrunk: dict[str, Any]
    seed: int = 0
    around: dict[str, Any] | None = None

    def json(self, **changes: Any) -> str:
        """The config.json, with changes."""
        text = {**SIZES, **self.config, **self.shrunk, **changes}
        return json.dumps(text if self.around is None else {**self.around, "text_config": text})

    @property
    def window(self) -> int | None:
        """Positions that its sliding layers see."""
        return {**self.config, **self.shrunk}.get("sliding_window")


MODELS = {
    "llama2": Published(
        "meta-llama/Llama-2-7b-hf",
        {
            "model_type": "llama",
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "tie_word_embeddings": False,
        },
        {"num_key_value_heads": 4},
    ),
    "llama3": Published(
        "meta-llama/Llama-3.1-8B-Instruct",
        {
            "model_type": "llama",
            "attention_bias": False,
            "hidden_act": "silu",
            "mlp_bias": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        },
        {
            "num_key_value_heads": 2,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 24,  # 8192
                "rope_type": "llama3",
            },
        },
    ),
    "mistral": Published(
        "mistralai/Mistral-7B-v0.1",
        {
            "model_type": "mistral",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        {"num_key_value_heads": 2, "sliding_window": WINDOW},  # 4096
    ),
    "qwen2": Published(
        "Qwen/Qwen2.5-0.5B-Instruct",
        {
            "model_type": "qwen2",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        {"num_key_value_heads": 2, "max_window_layers": 2, "sliding_window": None},
    ),
    # No published Qwen2 switches its window on; who does gets this.
    "qwen2-window": Published(
        "Qwen/Qwen2-7B-Instruct",
        {
            "model_type": "qwen2",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
        },
        {"num_key_value_heads": 2, "max_window_layers": 1, "sliding_window": WINDOW},
        seed=3,
    ),
    "qwen3": Published(
        "Qwen/Qwen3-0.6B",
        {
            "model_type": "qwen3",
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        {"head_dim": 16, "max_window_layers": 3, "num_key_value_heads": 2},
        seed=5,
    ),
    "gemma2": Published(
        "google/gemma-2-2b-it",
        {
            "model_type": "gemma2",
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
        },
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "query_pre_attn_scalar": 16,  # 256, like head_dim
            "sliding_window": WINDOW,  # 4096
        },
        seed=11,
    ),
    "gemma3": Published(
        "google/gemma-3-1b-it",
        {
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window_pattern": 6,
        },
        {
            "head_dim": 16,
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,  # 512
        },
        seed=7,
    ),
    "gemma3-seeing": Published(
        "google/gemma-3-4b-it",
        {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": 10000,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "rope_theta": 1000000,
            "sliding_window_pattern": 6,
        },
        {
            "head_dim": 16,
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,  # 1024
        },
        around={
            "model_type": "gemma3",
            "boi_token_index": 8,
            "eoi_token_index": 9,
            "image_token_index": 10,
            "mm_tokens_per_image": 4,
            "vision_config": {
                "hidden_size": 16,
                "image_size": 28,
                "intermediate_size": 16,
                "model_type": "siglip_vision_model",
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
        seed=2,
    ),
    "phi3": Published(
        "microsoft/Phi-3-mini-4k-instruct",
        {
            "model_type": "phi3",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        {
            "num_key_value_heads": 4,
            "original_max_position_embeddings": MAX_POSITIONS,  # 4096, like all its positions
            "sliding_window": WINDOW,  # 2047
        },
        seed=3,
    ),
    "phi3-long": Published(
        "microsoft/Phi-4-mini-instruct",
        {
            "model_type": "phi3",
            "attention_bias": False,
            "hidden_act": "silu",
            "partial_rotary_factor": 0.75,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
        {
            "num_key_value_heads": 2,
            "max_position_embeddings": 32 * MAX_POSITIONS,  # 131072
            "original_max_position_embeddings": MAX_POSITIONS,  # 4096
            "rope_scaling": {
                "long_factor": [1.0, 1.5, 4.0],  # of 48 numbers
                "short_factor": [1.0, 1.1, 1.2],
                "type": "longrope",
            },
            "sliding_window": 64 * MAX_POSITIONS,  # 262144
        },
        seed=14,
    ),
    "smollm2": Published(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        {
            "model_type": "llama",
            "attention_bias": False,
            "hidden_act": "silu",
            "mlp_bias": False,
            "rms_norm_eps": 1e-5,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
        },
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},  # 9 and 3
        seed=2,
    ),
    "mixtral": Published(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        {
            "model_type": "mixtral",
            "hidden_act": "silu",
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        {"num_key_value_heads": 2, "num_local_experts": 4},  # of 8
    ),
    "qwen3-moe": Published(
        "Qwen/Qwen3-30B-A3B",
        {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "hidden_act": "silu",
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        {
            "head_dim": 16,
            "max_window_layers": 3,
            "moe_intermediate_size": 24,
            "num_experts": 6,  # 128
            "num_experts_per_tok": 2,  # 8
            "num_key_value_heads": 1,
        },
        seed=7,
    ),
    "gpt-oss": Published(
        "openai/gpt-oss-20b",
        {
            "model_type": "gpt_oss",
            "attention_bias": True,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
        },
        {
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_experts_per_tok": 2,  # 4
            "num_key_value_heads": 1,
            "num_local_experts": 4,  # 32
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 3,  # 4096 of 131072
                "rope_type": "yarn",
                "truncate": False,
            },
            "sliding_window": WINDOW,  # 128
        },
    ),
}


def save(name: str, folder: Path, **changes: Any) -> Path:
    """A small random model with a published configuration, as a model folder.

    Args:
        changes: of its configuration.
    """
    published = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    text = published.json(**changes)
    config.write_text(text, encoding="utf-8")
    with quiet():
        made = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(made)
        randomize(model, published.seed)
        model.save_pretrained(folder)
        toys.word_tokenizer(VOCAB).save_pretrained(folder)
    # As published, not in the words of the transformers that wrote the weights.
    config.write_text(text, encoding="utf-8")
    return folder


@torch.no_grad()
def randomize(model: Any, seed: int) -> None:
    """Every weight anew, the same in every release of transformers.

    Norms, most biases and sinks begin as ones or zeros: nobody would notice their absence.
    """
    generator = torch.Generator().manual_seed(seed)
    for _, weight in sorted(model.named_parameters()):
        noise = 0.3 * torch.randn(weight.shape, generator=generator)
        weight.copy_(weight + noise if weight.dim() == 1 else noise)
    if model.config.get_text_config().tie_word_embeddings:  # else every token would repeat itself
        model.get_input_embeddings().weight *= 0.25
