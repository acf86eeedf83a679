"""QuantizerRole: the tensor and module that a quantizer is for; and names of modules without the wrappers around them.

A wrapped model draws the random bits of a plain one, because its roles have the same names.
"""

import re
from dataclasses import dataclass

TENSOR_TYPES = {
    "linear": ("input", "weight", "grad_output"),
    "grouped_linear": ("input", "weight", "grad_output"),
    "dpa": ("qkv", "s", "do", "dp"),
    "embedding": ("weight",),
    "norm": ("weight",),
}
"""Module type -> its tensors, in slot order. dpa is dot-product attention: queries, keys and values; the softmax's
output S; the gradients of the attention's output and of S."""


IN_HIGH_PRECISION = {"head": "bf16", "dpa": "bf16", "embedding": "fp32", "norm": "fp32"}
"""Part of a recipe -> its default quantizer."""


HEAD = "head"
"""Name of the output projection. It takes the recipe's section `head` instead of `linear`."""


GRADIENTS = ("grad_output", "do", "dp")
"""Tensors of the backward pass."""


@dataclass(frozen=True)
class QuantizerRole:
    """A value: equal fields mean the same slot. Empty fields are unknown and not printed. Experimental."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""
    """Path of the module in the model, such as "layers.3.attn.qkv"."""
    expert: int | None = None
    """The expert of a grouped linear; overrides by name reach all experts."""

    def __str__(self) -> str:
        words = (self.name, self.module_type, self.tensor_type, "" if self.expert is None else str(self.expert))
        return "/".join(word for word in words if word)

    @property
    def layer(self) -> int | None:
        """Index of the module's layer: the first number among the parts of its name, 3 in the example."""
        match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", self.name)
        return int(match[1]) if match else None


def module_roles(module_type: str, name: str) -> list[QuantizerRole]:
    """Return the roles of a module's own tensors, in slot order."""
    return [QuantizerRole(module_type, tensor, name) for tensor in TENSOR_TYPES[module_type]]


WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")
"""The parts of a name that wrappers put anywhere: torch.compile, FSDP, activation checkpointing, PEFT's adapters."""
OUTERMOST = (("module",), ("base_model", "model"))
"""The parts that wrappers put first: DataParallel and DistributedDataParallel, PEFT's models."""


def clean_name(fqn: str) -> str:
    """The fully qualified name of a module or parameter in the plain model."""
    parts = [part for part in fqn.split(".") if part not in WRAPPERS]
    while prefix := next((first for first in OUTERMOST if (*parts[: len(first)],) == first), ()):
        parts = parts[len(prefix) :]
    return ".".join(parts)
