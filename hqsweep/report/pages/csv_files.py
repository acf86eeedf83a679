"""CSV files that pandas.read_csv, by its defaults, reads back with every name as text, and in which a spreadsheet finds
no formula."""

import re
from pathlib import Path

import pandas as pd

READ_AS_MISSING = frozenset((
    "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL",
    "NaN", "None", "n/a", "nan", "null",
))  # fmt: skip
"""Words that pandas.read_csv takes for a missing value, in quotes too."""


FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The beginnings of a cell by which a spreadsheet takes it for a formula, four of them as wide characters; a
tab or a line break may be skipped before one."""
QUOTE = "'"
"""What stands before such a cell, and before one that begins with it itself."""


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """The rows as CSV without the index.

    A text that a spreadsheet would run has an apostrophe before it, "'=1+1", and so has one that begins with an
    apostrophe; read_csv takes it away. Numbers stay as they are, also those in text. A name that would be read as
    missing has " arm" after it: the arm "null" is written as "null arm".
    """
    text = frame.select_dtypes(exclude="number").columns
    safe = frame.assign(**{name: frame[name].map(_written) for name in text})
    safe = safe.rename(columns=_written)
    cells = [cell for name in text for cell in safe[_written(name)]]
    returns = any("\r" in cell for cell in [*safe.columns, *cells] if isinstance(cell, str))
    # a carriage return is quoted where it ends lines; else many programs take it for the end of one
    safe.to_csv(path, index=False, lineterminator="\r\n" if returns else "\n")


def read_csv(path: Path) -> pd.DataFrame:
    """What write_csv wrote, without its apostrophes."""
    frame = pd.read_csv(path).rename(columns=_read)
    text = frame.select_dtypes(exclude="number").columns
    return frame.assign(**{name: frame[name].map(_read) for name in text})


def _written(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    if cell.lstrip(" ").startswith((*FORMULA, QUOTE)) and not _is_number(cell):
        return QUOTE + cell
    return f"{cell} arm" if cell in READ_AS_MISSING else cell


def _read(cell: object) -> object:
    return cell[1:] if isinstance(cell, str) and cell.startswith(QUOTE) else cell


def _is_number(cell: str) -> bool:
    """Whether a text is a number to every program; float() alone takes "-nan", "-1_0" and "\t1"."""
    return re.fullmatch(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", cell, re.ASCII) is not None
