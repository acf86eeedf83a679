"""Tiny random models of Hugging Face, made here; nothing is downloaded."""

import os

import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"
VOCABULARY = 96
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": {"intermediate_size": 96},
    "gpt2": {"n_positions": 128, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "mixtral": {"intermediate_size": 48, "num_local_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v3": {
        "moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def tiny(kind: str, **options) -> nn.Module:
    """A causal language model in float32, of 2 layers and 64 features; biases and sinks are no zeros."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_BASE | CONFIGS.get(kind, {}) | options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.1)
    return model


def tokens(rows: int = 2, length: int = 32) -> torch.Tensor:
    """int64 [rows, length]"""
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, **inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradient of each parameter."""
    model.zero_grad()
    ids = tokens()
    output = model(ids, labels=ids, use_cache=False, **inputs)
    output.loss.backward()
    return output.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def equal(a, b) -> bool:
    """Whether two steps are equal to the bit."""
    return torch.equal(a[0], b[0]) and a[1].keys() == b[1].keys() and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


def furthest(a, b) -> float:
    """The largest relative distance of the gradients of two steps."""
    return max(float((a[1][name] - b[1][name]).norm() / a[1][name].norm()) for name in a[1])
