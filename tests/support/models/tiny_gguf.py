"""A tiny GGUF file of the Llama family, written by the package gguf."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.tiny import tiny
from torch import nn

WORDS = [*(chr(code) for code in range(ord("!"), ord("!") + 90)), "Ġ", "Ċ", "ab", "cd", "<|endoftext|>", "<|end|>"]
"""96 tokens of the family of GPT-2."""
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
    "model.layers": "blk",
}  # fmt: skip
"""Parts of names, of Hugging Face and of GGUF."""


def write_gguf(path: Path, architecture: str = "llama") -> nn.Module:
    """Write the weights of tiny("llama") in float32, with a tokenizer. Returns that model."""
    gguf = pytest.importorskip("gguf")
    model = tiny("llama")
    config, writer = model.config, gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * (len(WORDS) - 2) + [3, 3])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(len(WORDS) - 2)
    writer.add_eos_token_id(len(WORDS) - 1)
    for name, weight in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        count = next((heads[part] for part in heads if part in name), None)
        writer.add_tensor(_name(name), _permuted(weight, count).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _permuted(weight: torch.Tensor, heads: int | None) -> torch.Tensor:
    """Rows of query and key in the order of GGUF, whose rotary positions turn neighbours."""
    if heads is None:
        return weight
    rows = np.arange(len(weight)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    return weight[torch.from_numpy(rows)]
