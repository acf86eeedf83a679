"""Names of modules without the wrappers around them, so that a wrapped model draws the random bits of a plain one."""

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
