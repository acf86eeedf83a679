"""The exception with a message for people, and the exit codes of commands and workers.

Everything a user can get wrong (a format string, a config key, a path) raises UserError with one clear sentence:
where, what came, which values are allowed, what to do. The command line prints it and exits 2; it never shows a
traceback.
"""

import difflib
from collections.abc import Iterable

EXIT_MISMATCH = 1
"""A regression, a loss outside its band, or a check that FAILs."""
EXIT_USAGE = 2
"""Wrong words on the command line, or a wrong config."""
EXIT_FAILED = 3
"""A run failed, which says why in its status, or is missing."""
EXIT_UNDECIDED = 4
"""No usable baseline, or too few seeds to decide."""
EXIT_STORAGE = 74
"""A worker cannot write in its run folder, so neither its status nor a reason (EX_IOERR of sysexits.h)."""
EXIT_BUSY = 75
"""A worker found its run folder locked by another (EX_TEMPFAIL)."""


class UserError(ValueError):
    """Wrong input by a person; `str(error)` is the whole message."""

    def _render_traceback_(self) -> list[str]:
        """The lines that a notebook shows in place of a traceback."""
        return [f"{type(self).__name__}: {visible(str(self))}"]


class Damaged(UserError):
    """A file of a run or a sweep was changed after it was written.

    The message has the file, its fault and the remedy; each is also an attribute.
    """

    def __init__(self, file: object, fault: str, remedy: str) -> None:
        super().__init__(f"{file}: {fault}; {remedy}")
        self.file, self.fault, self.remedy = str(file), fault, remedy


class Missing(Damaged):
    """A run's folder or its config is gone."""


def nearest(word: object, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)" for the closest known word, or "" when none is close. A YAML's key may be no text."""
    match = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean '{match[0]}'?)" if match else ""


def visible(text: str, keep: str = "") -> str:
    """Return the text with every character that is not printable, nor in `keep`, as Python's escape, `\\x1b`, `\\n` or
    `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
