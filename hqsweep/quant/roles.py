"""QuantizerRole: which tensor of which module a quantizer is asked for."""

from dataclasses import dataclass

TENSOR_TYPES = {
    "linear": ("input", "weight", "grad_output"),
    "embedding": ("weight",),
    "norm": ("weight",),
}
"""Module type -> its tensors, in slot order."""


@dataclass(frozen=True)
class QuantizerRole:
    """A value: equal fields mean the same slot. Empty fields are unknown and not printed."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""
    """Path of the module in the model, such as "layers.3.attn.qkv"."""

    def __str__(self) -> str:
        return "/".join(part for part in (self.name, self.module_type, self.tensor_type) if part)
