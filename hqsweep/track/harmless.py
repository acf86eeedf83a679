"""A mirror never raises once it is open: what it cannot do becomes one line in the log, said once."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar


class HarmlessTracker:
    """Base of trackers whose methods are `harmless`."""

    who: ClassVar[str]
    """The beginning of its lines in the log."""

    def __init__(self) -> None:
        self._complaints: set[str] = set()

    def complain(self, line: str) -> None:
        """Say it in the log, once."""
        if line not in self._complaints:
            self._complaints.add(line)
            print(f"{self.who}: {line}; the run goes on, its rows are in its folder", flush=True)


def harmless(method: Callable[..., Any]) -> Callable[..., bool]:
    """Whatever the method raises becomes a complaint, and the result False."""

    @functools.wraps(method)
    def guarded(self: HarmlessTracker, *args: Any, **kwargs: Any) -> bool:
        try:
            return method(self, *args, **kwargs) is not False
        except Exception as error:
            self.complain(f"{method.__name__}: {one_line(error)}")
            return False

    return guarded


def one_line(error: Exception) -> str:
    """Type and message of an error without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())
