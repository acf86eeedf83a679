"""A Llama or Qwen3 of Hugging Face in the layout of torchtitan, as its state_dict adapters write it."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight", "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "model.layers": "layers", "mlp.gate.weight": "moe.router.gate.weight",
}  # fmt: skip


def titan(state: Mapping[str, Tensor], config: Any, *, permuted: bool) -> dict[str, Tensor]:
    """A state_dict, or moments by the same names."""
    renamed = {}
    for name, value in state.items():
        short = name
        for theirs, ours in NAMES.items():
            short = short.replace(theirs, ours)
        lead = short.partition("mlp.experts")[0]
        if "q_proj" in name and permuted:
            value = pairs_of_halves(value, config.num_attention_heads)
        if "k_proj" in name and permuted:
            value = pairs_of_halves(value, config.num_key_value_heads)
        if name.endswith("experts.gate_up_proj"):
            renamed[f"{lead}moe.experts.w1"], renamed[f"{lead}moe.experts.w3"] = (
                x.clone() for x in value.chunk(2, dim=1)
            )
        elif name.endswith("experts.down_proj"):
            renamed[f"{lead}moe.experts.w2"] = value
        else:
            renamed[short] = value
    return renamed


def pairs_of_halves(w: Tensor, heads: int) -> Tensor:
    """torchtitan's _reverse_permute."""
    rows, columns = w.shape
    return w.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write(state: dict[str, Any], folder: Path) -> Path:
    """By torch.distributed.checkpoint in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def write_titan(
    model: Any, optimizer: torch.optim.Optimizer, folder: Path, change: Callable = lambda name: name
) -> Path:
    """model and optimizer as torchtitan saves them; change: of names of weights."""
    permuted = model.config.model_type == "llama"
    names = {p: name for name, p in model.named_parameters()}
    state: dict[str, Any] = {}
    for key in ("exp_avg", "exp_avg_sq"):
        moments = {names[p]: values[key] for p, values in optimizer.state.items()}
        for name, value in titan(moments, model.config, permuted=permuted).items():
            state |= {f"state.{change(name)}.{key}": value, f"state.{change(name)}.step": torch.tensor(2.0)}
            state[f"param_groups.{change(name)}.lr"] = 1e-3
    weights = titan(dict(model.named_parameters()), model.config, permuted=permuted)
    beside = {"optimizer": state, "train_state": {"step": torch.tensor(2)}, "lr_scheduler": {"last_epoch": 2}}
    return write({change(name): w.detach() for name, w in weights.items()} | beside, folder)
