"""The one exception that is meant for people.

Everything a user can get wrong (a format string, a config key, a path) raises UserError with one clear sentence:
where, what came, what is allowed, what to do. The command line prints it and exits 2; it never shows a traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Wrong input by a person; `str(error)` is the whole message."""


def nearest(word: object, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)" for the closest known word, or "" when none is close. A YAML's key may be no text."""
    match = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean '{match[0]}'?)" if match else ""
