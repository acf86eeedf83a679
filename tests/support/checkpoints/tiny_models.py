"""Tiny random models of Hugging Face, made from their configurations."""

from typing import Any

import torch

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}


def tiny(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights, whose vectors are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = GPT2 if model_type == "gpt2" else SHAPE
    experts = EXPERTS if model_type in ("mixtral", "qwen3_moe", "gpt_oss") else {}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(shape | experts | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two models have the same tensors by the same names."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Steps on random gradients."""
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
