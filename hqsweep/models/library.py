"""transformers as a library: imported only where it is needed, kept quiet, and its errors as one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hqsweep.errors import UserError


def transformers() -> Any:
    """The module, whose import takes seconds. UserError where it is not installed."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            "model: a Hugging Face model needs the package transformers; pip install 'hqsweep[models]'"
        ) from None
    return transformers


@contextmanager
def quietly() -> Iterator[None]:
    """Within this context transformers shows no progress bars, and no report that a UserError repeats."""
    logging = transformers().utils.logging
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def one_line(error: Exception) -> str:
    """The first line of an exception's message, or its type where it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
