"""torch.load as it may be used on files of others: torch's weights_only unpickler builds tensors and plain containers,
and calls nothing else. torch's advice on how to run the rest, and its warnings, reach nobody."""

import warnings
from pathlib import Path
from typing import IO, Any

NO_SUCH = "it is no file of torch.save with tensors and plain containers alone; save the state_dict of the model"


def load(file: Path | IO[bytes], *, device: Any = "cpu", mmap: bool = False) -> Any:
    """The content of a file of torch.save. Raises OSError, and Refused for whatever else torch raises."""
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.load(file, map_location=device, weights_only=True, mmap=mmap)
    except OSError:
        raise
    except Exception as error:  # bytes of others make torch.load raise anything
        raise Refused(_why(error)) from None


class Refused(ValueError):
    """Why torch does not load a file, in a sentence without the file's name."""


def _why(error: Exception) -> str:
    """The reason that torch gave, in a sentence of ours where it is one of the usual four."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "GLOBAL " in text:
        needed = text.split("GLOBAL ", 1)[1].split(" ")[0]
        return f"it holds an object of Python, {needed}, which is not loaded; save the state_dict of the model alone"
    if "TorchScript" in text:
        return "it is a TorchScript archive; save the state_dict of the model"
    if "central directory" in text or "PytorchStreamReader" in text or isinstance(error, EOFError):
        return "it is cut short, or no file of torch.save; copy it again"
    if "weights_only" in text or "Weights only" in text or "safe_globals" in text:  # how to run what is refused
        return NO_SUCH
    return f"torch cannot load it ({text[:200]})"
