"""Tiny random Llamas of Hugging Face, as a user has them, and what a training step gives."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hqsweep.recipe.roles import clean_name

VOCABULARY, CONTEXT, BATCH = 64, 16, 2


def llama(layers: int = 2, *, seed: int = 0, **config) -> LlamaForCausalLM:
    """In float32, with grouped queries and an untied head."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = {"tie_word_embeddings": False, "use_cache": False} | sizes | config
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, **config))


def tokens(step: int = 1) -> Tensor:
    """int64 [BATCH, CONTEXT]."""
    return torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int = 1) -> Tensor:
    batch = tokens(step).to(next(model.parameters()).device)
    return model(input_ids=batch, labels=batch).loss


def results(model: nn.Module, step: int = 1) -> dict[str, Tensor]:
    """The loss and all gradients of one forward and backward, by the names of the plain model."""
    model.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    gradients = {clean_name(name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that differ in a bit; both have the same names."""
    assert a.keys() == b.keys() and a
    return [name for name in a if not torch.equal(a[name], b[name])]
