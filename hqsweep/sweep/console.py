"""A console to which text of others is harmless: what a terminal would obey is shown as text.

Names, reasons and configs may come from a folder of somebody else, and an escape sequence in them could clear the
screen, set the clipboard or colour a failure green.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from hqsweep.errors import visible


class SafeConsole(Console):
    """rich's Console, but with `visible` text in all that it prints; its own colours and cursor movements stay."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text, keep="\n\t"), segment.style)
