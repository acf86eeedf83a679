"""A Parquet file whose column of text is there."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hqsweep.errors import UserError, nearest


@contextmanager
def open_parquet(path: Path, name: str, column: str) -> Iterator[Any]:
    """The ParquetFile, whose column is there and is text.

    Raises:
        UserError: it is not.
    """
    import pyarrow
    from pyarrow import parquet, types

    try:
        table = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        why = " ".join(str(error).split())
        raise UserError(f"{name}: is no whole Parquet file ({why}); copy it again, or --format says else") from None
    with table:
        schema = table.schema_arrow
        if column not in schema.names:
            raise UserError(
                f"{name}: no column '{column}'{nearest(column, schema.names)}; it has {listed(schema.names)}; --column"
                " names one"
            )
        kind = schema.field(column).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise UserError(f"{name}: column '{column}' is {kind}, not text; --column names another")
        yield table


def listed(names: Iterable) -> str:
    """The first names, for a sentence."""
    shown = list(map(str, names))
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "") or "no key"
