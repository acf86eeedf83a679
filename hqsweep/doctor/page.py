"""The doctor's findings as tables, and as plain facts for --json."""

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from hqsweep.doctor.machine import Part, parts
from hqsweep.doctor.products import FORMATS, MARKS, Product, capability_here, products, reasons
from hqsweep.report.pages.text import TextTable, to_rich

FOUND = {True: "yes", False: "no", None: "broken"}
STYLES = {True: "", False: "dim", None: "red"}
LEGEND = (
    "N native: on the tensor cores of this machine (gemm=native); high precision has one plan in every mode.  S strict:"
    " exact here, and some tensor cores take the pair.  x exact only: no hardware GEMM takes the pair.  - none."
)


def doctor() -> tuple[RenderableType, dict[str, Any]]:
    """(page, document): the machine's parts, every pair of formats, and why a pair has no product in a mode."""
    machine, pairs = parts(), products(capability_here())
    why = reasons(pairs)
    document = {
        "machine": {part.what: {"found": part.present, "detail": part.detail} for part in machine},
        "products": [{"mode": pair.mode, **asdict(pair)} for pair in pairs],
        "reasons": why,
    }
    return Group(_machine(machine), _matrix(pairs), Text(LEGEND), Text(), _native(pairs), _why(why)), document


def _machine(machine: list[Part]) -> RenderableType:
    rows = tuple((part.what, FOUND[part.present], part.detail) for part in machine)
    table = TextTable(header=("part", "there", "what, or why not"), rows=rows)
    return to_rich(table, "this machine", [STYLES[part.present] for part in machine])


def _matrix(pairs: list[Product]) -> RenderableType:
    """Rows and columns are FORMATS, columns by the numbers of the rows."""
    mark = {(p.a, p.b): MARKS[p.mode] for p in pairs}
    rows = [
        (f"{number} {a}", *(mark.get((a, b)) or mark[b, a] for b in FORMATS)) for number, a in enumerate(FORMATS, 1)
    ]
    header = ("operand", *(str(number) for number in range(1, len(FORMATS) + 1)))
    return to_rich(TextTable(header=header, rows=tuple(rows)), "products of two operands")


def _native(pairs: list[Product]) -> RenderableType:
    """Which tensor cores take which low-precision pairs."""
    on = dict.fromkeys(sm for pair in pairs for sm in pair.native_on)
    high = {p.a for p in pairs if p.a == p.b and p.native_on and not p.native_fault and len(p.native_on) == len(on)}
    rows = []
    for sm in on:
        taken = [p for p in pairs if sm in p.native_on and p.a not in high]
        notes = "from documents, not yet run there" if any(sm in p.untried for p in taken) else ""
        rows.append((sm, notes, ", ".join(f"{p.a} x {p.b}" if p.a != p.b else p.a for p in taken)))
    return to_rich(TextTable(header=("on", "note", "pairs (one name: with itself)"), rows=tuple(rows)), "gemm=native")


def _why(why: list[dict[str, Any]]) -> RenderableType:
    rows = tuple((row["mode"], str(row["pairs"]), row["reason"], row["example"]) for row in why)
    table = TextTable(header=("no", "pairs", "because", "for example"), rows=rows, numeric=frozenset({1}))
    return to_rich(table, "why not")
