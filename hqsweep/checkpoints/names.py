"""The tensors of a checkpoint from which a tensor of a model is made.

torchtitan and Hugging Face have different names. The rows of Llama's q and k projections are in another order, too:
torchtitan rotates pairs of neighbours, Hugging Face the two halves of a head
(torchtitan/models/llama3/state_dict_adapter.py). Moments are made from the optimizer's state in the same way.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from hqsweep.errors import UserError

Names = Literal["hf", "torchtitan"] | Mapping[str, str] | None

TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}
LAYER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "moe.router.gate.weight": "mlp.gate.weight",
    "moe.experts.w2": "mlp.experts.down_proj",
}
"""torchtitan's names in a layer -> names in Hugging Face's state_dict."""
GATE_UP = ("moe.experts.w1", "moe.experts.w3"), "mlp.experts.gate_up_proj"
FUSED_QKV = "attention.wqkv.weight"
"""torchtitan's name of q, k and v in one weight: for each k/v head its q heads, then k, then v."""
PERMUTED = {"llama": True, "qwen3": False, "qwen3_moe": False}
"""model_type of Hugging Face -> whether torchtitan has the rows of q and k in another order. It is not known for
others."""


@dataclass(frozen=True)
class Piece:
    """The tensors of the checkpoint from which a tensor of a model is made, and how."""

    sources: tuple[str, ...]
    make: Callable[..., Tensor] = lambda tensor: tensor
    permuted: bool = False


Pieces = dict[str, Piece]


def pieces_of(names: Names, there: Collection[str], wanted: Collection[str], config: Any = None) -> Pieces:
    """Name in a model -> its Piece, for the tensors that the names reach.

    there: names in the checkpoint. wanted: names in the model. config: the config of a Hugging Face model, for
    torchtitan's names. names: None for the model's own, or torchtitan's where the checkpoint has such.
    """
    if isinstance(names, Mapping):
        if strange := [name for name in names if name not in there]:
            raise UserError(f"names: the checkpoint has no tensor {strange[0]!r}")
        return {names.get(name, name): Piece((name,)) for name in there}
    is_titan = "tok_embeddings.weight" in there and "tok_embeddings.weight" not in wanted
    if names == "torchtitan" or (names is None and is_titan and config is not None):
        return _of_torchtitan(there, config)
    if names not in (None, "hf"):
        raise UserError(f"names: {names!r} is not known; give 'hf', 'torchtitan', or a mapping of names")
    return {name.removeprefix(lead): Piece((name,)) for lead in [_lead(there, wanted)] for name in there}


def _lead(there: Collection[str], wanted: Collection[str]) -> str:
    """The prefix that all names in the checkpoint share, and without which they are the model's, such as "model." of a
    LightningModule; else ""."""
    first = next(iter(there), "")
    parts = first.split(".")
    for count in range(1, len(parts)):
        lead = ".".join(parts[:count]) + "."
        if first.removeprefix(lead) in wanted and first not in wanted:
            return lead if all(name.startswith(lead) for name in there) else ""
    return ""


def _of_torchtitan(there: Collection[str], config: Any) -> Pieces:
    model_type = getattr(config, "model_type", None)
    if model_type not in PERMUTED:
        known = ", ".join(PERMUTED)
        raise UserError(
            f"names: torchtitan's are known for {known}, and the model is {model_type or 'none of Hugging Face'}; give"
            " a mapping of names"
        )
    pieces: Pieces = {TOP[name]: Piece((name,)) for name in there if name in TOP}
    for name in there:
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if match is None:
            if name not in TOP:
                pieces[name] = Piece((name,))
            continue
        layer, rest = f"model.layers.{match[1]}.", match[2].replace("attention.qkv_linear.", "attention.")
        rest = re.sub(r"(experts\.w[123])_[A-Z]+$", r"\1", rest)  # w1_EFD says its axes
        if rest == GATE_UP[0][0]:
            pieces[layer + GATE_UP[1]] = Piece((name, name.replace("experts.w1", "experts.w3")), _side_by_side)
        elif rest == FUSED_QKV:
            pieces |= _separate_qkv(name, layer, config)
        elif rest != GATE_UP[0][1]:
            pieces[layer + LAYER.get(rest, rest)] = _piece(name, rest, config)
    return pieces


def _piece(name: str, rest: str, config: Any) -> Piece:
    heads = {"attention.wq.weight": config.num_attention_heads, "attention.wk.weight": _kv_heads(config)}
    if rest not in heads or not PERMUTED[config.model_type]:
        return Piece((name,))
    return Piece((name,), lambda rows: halves_of_pairs(rows, heads[rest]), permuted=True)


def halves_of_pairs(rows: Tensor, heads: int) -> Tensor:
    """The rows of q or k [heads * D, K] in Hugging Face's order: in each head even rows first, then odd ones."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _side_by_side(*experts: Tensor) -> Tensor:
    """Gate and up projections [E, I, H] as one [E, 2 I, H]."""
    from torch import cat

    return cat(experts, dim=1)


def _separate_qkv(name: str, layer: str, config: Any) -> Pieces:
    kv_heads = _kv_heads(config)
    queries = config.num_attention_heads // kv_heads
    permuted = PERMUTED[config.model_type]

    def part(rows: slice, heads: int | None) -> Callable[[Tensor], Tensor]:
        def make(fused: Tensor) -> Tensor:
            chosen = fused.unflatten(0, (kv_heads, queries + 2, -1))[:, rows].flatten(0, 2)
            return halves_of_pairs(chosen, heads) if heads and permuted else chosen

        return make

    rows = {
        "q": (slice(0, queries), config.num_attention_heads),
        "k": (slice(queries, queries + 1), kv_heads),
        "v": (slice(queries + 1, queries + 2), None),
    }
    return {
        f"{layer}self_attn.{kind}_proj.weight": Piece((name,), part(where, heads), permuted and heads is not None)
        for kind, (where, heads) in rows.items()
    }


def _kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def joined(piece: Piece, tensors: Mapping[str, Tensor]) -> Tensor:
    """A tensor of a model, from its piece. KeyError for a source that is missing."""
    return piece.make(*(tensors[name] for name in piece.sources))


def unused(pieces: Pieces, there: Collection[str]) -> Sequence[str]:
    """Return the names in the checkpoint from which no tensor is made."""
    used = {name for piece in pieces.values() for name in piece.sources}
    return [name for name in there if name not in used]
