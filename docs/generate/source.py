"""What the source says of itself: docstrings as Markdown, and the text under each field of a class."""

import ast
import inspect
import itertools

from hqsweep.report.pages.text import TextTable, markdown

Rows = list[tuple[str, ...]]


def table(header: tuple[str, ...], rows: Rows) -> str:
    return markdown(TextTable(header=header, rows=tuple(rows))) if rows else ""


def docstring(thing: object) -> str:
    """As a block of text, so that formulas keep their columns."""
    return f"```text\n{inspect.getdoc(thing)}\n```\n"


def field_texts(cls: type) -> dict[str, str]:
    """Field -> the string that stands under it, of a class and those it builds on."""
    found: dict[str, str] = {}
    for base in reversed([c for c in cls.__mro__ if c.__module__.startswith("hqsweep")]):
        body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base))).body[0].body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = " ".join(text.value.value.split())
    return found
