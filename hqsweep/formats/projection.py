"""The text of a projection, project(GRID) > QUANTIZER, and the formats that it takes; without torch.

A weight is rounded to the values of GRID, a format that a checkpoint is deployed in, and then quantized as QUANTIZER
says. It trains on the weights that will be deployed.
"""

import re
from collections.abc import Mapping
from typing import Any

from hqsweep.errors import UserError
from hqsweep.formats.spec import fields_of, words_of

FIELD = "project"
"""The key of the grid where a quantizer is a mapping."""
GRIDS = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4")
HOSTS = ("mxfp8", "fp8_block")
_TEXT = re.compile(r"\s*project\s*\(([^()]*)\)\s*>(.*)", re.DOTALL)
_REFUSED = {
    "sr": "its values are drawn anew at each use, and a checkpoint has one",
    "rht": "its values are transformed, and a weight is not",
    "row_scaled": "it is for rows of inputs",
}
"""Beginning of an option that a grid does not take -> the reason."""


def split(value: Any) -> tuple[str | None, Any]:
    """Return the text of the grid, None without a projection, and the quantizer without it.

    value: a text, or a mapping with the key "project". UserError for a text that only begins as a projection.
    """
    if isinstance(value, Mapping) and FIELD in value:
        grid = value[FIELD]
        return None if grid is None else str(grid).strip(), {k: v for k, v in value.items() if k != FIELD}
    if not isinstance(value, str) or not value.lstrip().startswith(FIELD):
        return None, value
    found = _TEXT.fullmatch(value)
    if found is None:
        raise UserError(f"quantizer '{value}': a projection is project(GRID) > QUANTIZER, as in {example()}")
    return found[1].strip(), found[2].strip()


def joined(grid: str, quantizer: str) -> str:
    """Return the text of a projection."""
    return f"{FIELD}({grid}) > {quantizer}"


def example() -> str:
    return f"'{joined('mxfp4', 'mxfp8')}'"


def check_projection(grid: str, hosts: tuple[str, str]) -> None:
    """Raise UserError for a grid that is no narrower format, and for a host that has no power-of-two block scales.

    grid: the text of a format. hosts: the texts of both directions.
    """
    fields_of(grid)
    name, options = words_of(grid)
    if name not in GRIDS:
        raise UserError(
            f"project({grid}): {name} is no grid that is narrower than its hosts; it takes {', '.join(GRIDS)}"
        )
    for option in options:
        reason = next((why for start, why in _REFUSED.items() if option.startswith(start)), None)
        if reason:
            raise UserError(f"project({grid}): drop +{option}: {reason}")
    for host in hosts:
        fields = fields_of(host)[1]
        if words_of(host)[0] not in HOSTS or fields.get("pow2") is False:
            raise UserError(
                f"project({grid}) > {host}: a host is mxfp8 or fp8_block, in both directions, with scales that are"
                " powers of two"
            )
