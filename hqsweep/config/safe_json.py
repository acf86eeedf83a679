"""json.loads for files of others: deep nesting is a ValueError, like all other garbage.

Python's own RecursionError comes late, and at a depth that depends on the caller: comparing, writing or hashing what
was read may meet it as well.
"""

import json
from typing import Any

MAX_DEPTH = 100


def loads(data: str | bytes) -> Any:
    """The document in `data`. ValueError for what is no JSON, and for lists and mappings nested deeper than
    MAX_DEPTH."""
    try:
        document = json.loads(data)
    except RecursionError:
        raise _too_deep() from None
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [part for value in level if isinstance(value, dict | list) for part in _parts(value)]
        if not level:
            return document
    raise _too_deep()


def _parts(value: dict | list) -> list[Any]:
    """What is in a mapping or a list and may itself have parts."""
    values = value.values() if isinstance(value, dict) else value
    return [part for part in values if isinstance(part, dict | list)]


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} deep")
