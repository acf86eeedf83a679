"""CSV files that pandas.read_csv, by its defaults, reads back with every name as text."""

from pathlib import Path

import pandas as pd

READ_AS_MISSING = frozenset((
    "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL",
    "NaN", "None", "n/a", "nan", "null",
))  # fmt: skip
"""Words that pandas.read_csv takes for a missing value, in quotes too."""


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """The rows as CSV without the index. A name that would be read as missing has " arm" after it: the arm "null" is
    written as "null arm"."""
    text = frame.select_dtypes(exclude="number").columns
    frame.assign(**{name: frame[name].map(_named) for name in text}).to_csv(path, index=False)


def _named(cell: object) -> object:
    return f"{cell} arm" if isinstance(cell, str) and cell in READ_AS_MISSING else cell
