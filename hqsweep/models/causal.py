"""Whether a model sees tokens that come later. Then its loss is that of tokens which it was given, and says nothing."""

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.models.losses import is_hugging_face, logits_of
from hqsweep.models.unpacked import unpacked

TOKENS = 8
"""The number of tokens of the trial."""
LEAK = 1e-4
"""The least change of logits, relative to the largest of them, that is no rounding: where a token changes the sizes of
products, as in a mixture of experts, float32 sums have another order."""


def check_causal(model: nn.Module, vocab_size: int) -> None:
    """UserError for a model of which logits change with a token after theirs. One with a loss of its own, or one that
    does not run on a few tokens where it lies, is not judged."""
    if not is_hugging_face(model) and callable(getattr(model, "loss", None)):
        return
    tokens = torch.arange(TOKENS, device=next(model.parameters()).device).remainder(vocab_size)[None]
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % vocab_size
    training = model.training
    model.eval()
    try:
        logits, changed = _logits(model, tokens), _logits(model, other)
    except Exception:  # what is wrong is said by the training
        return
    finally:
        model.train(training)
    change, largest = (changed - logits)[:, :-1].abs().max(), logits.abs().max()
    if change > max(LEAK, torch.finfo(logits.dtype).eps) * largest:
        raise UserError(
            f"model: {type(model).__name__} sees tokens that come later: its logits changed with a token after theirs,"
            " so that the loss of the next token says nothing; give a causal model (an encoder of Hugging Face takes"
            " is_decoder=true in its config.json), or one whose method loss(tokens, targets) is what it is trained for"
        )


@torch.no_grad()
def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits of a forward whose random numbers, if it draws any, are always the same."""
    with torch.random.fork_rng(devices=[]), unpacked():
        torch.manual_seed(0)
        options = {"input_ids": tokens, "use_cache": False} if is_hugging_face(model) else {}
        return model(**options).logits if options else logits_of(model, tokens)
