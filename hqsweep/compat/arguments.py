"""Arguments of TransformerEngine's modules that this package has no counterpart of."""

from collections.abc import Collection, Mapping
from typing import Any

from hqsweep.errors import UserError

SAYS_NOTHING = ("device", "get_rng_state_tracker", "rng_tracker_name")
"""Arguments without an effect on numbers: parts of weights are cut from one whole, which every rank draws alike."""


def refuse(kind: str, arguments: Mapping[str, Any], says_nothing: Collection[str] = SAYS_NOTHING) -> None:
    """UserError that names those of the arguments that would change something, for a module of this kind."""
    refused = [f"{n}={v!r}" for n, v in arguments.items() if n not in says_nothing and v not in (None, False, 0)]
    if refused:
        raise UserError(f"{kind}: {', '.join(refused)} has no counterpart here; leave it out")
