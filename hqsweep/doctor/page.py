"""`hqsweep doctor`: a page of this machine's parts, and of the product of each pair of formats here.

exact   gemm=exact: any two formats on any device, except products that no arithmetic gets right.
strict  gemm=strict: as exact, for pairs that some hardware GEMM takes.
native  gemm=native: on the tensor cores of this machine.
"""

import itertools
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from hqsweep import formats
from hqsweep.doctor.machine import Part, parts
from hqsweep.errors import UserError, nearest
from hqsweep.formats import parse
from hqsweep.gemm.native import CUDA_KINDS, fault
from hqsweep.gemm.plan import UNTRIED, gemm_plan, plan_text
from hqsweep.recipe.pairs import hardware_fault, mathematical_fault
from hqsweep.report.pages.text import TextTable, to_rich


def _pairing_unlike(name: str) -> list[str]:
    """The name, and its first spelling for each other answer to the questions that decide a product."""
    answers: dict[tuple, str] = {}
    for text in formats.spellings(name):
        f = parse(text)
        two_d = f.two_d and f.scaling == "block"
        answers.setdefault((f.element_name, two_d, f.fits_bf16, f.rht, f.rht_signed), text)
    return [text for text in answers.values() if len(formats.words_of(text)[1]) < 2]


FORMATS = tuple(text for name in formats.NAMES for text in _pairing_unlike(name))
"""Every name, and the options that decide which operands may meet."""
MARKS = {"native": "N", "strict": "S", "exact": "x", "none": "-"}
"""The best mode of a pair -> its mark in the table."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """One pair; `exact`, `strict` and `native` are plans or, where the name ends in `_fault`, why there is none."""

    a: str
    b: str
    exact: str | None
    exact_fault: str | None
    strict_fault: str | None
    native: str | None
    native_fault: str | None
    native_on: tuple[str, ...]
    """Compute capabilities whose tensor cores take the pair, as "sm_90"."""
    untried: tuple[str, ...]
    """The capabilities in native_on that follow documents and were not run."""

    @property
    def mode(self) -> str:
        """The best one that runs here: native, strict, exact or none."""
        if self.exact_fault:
            return "none"
        return "native" if self.native else "exact" if self.strict_fault else "strict"


def products(capability: tuple[int, int] | None) -> list[Product]:
    """All unordered pairs of FORMATS, for a device with that compute capability; None: a CPU."""
    return [_product(a, b, capability) for a, b in itertools.combinations_with_replacement(FORMATS, 2)]


def capability_here() -> tuple[int, int] | None:
    """Compute capability of the first GPU that torch sees; None where it sees none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def reasons(pairs: list[Product]) -> list[dict[str, object]]:
    """mode, reason, pairs (how many), example: why pairs go no further than the mode before; most pairs first."""
    rows, left = [], pairs
    for mode in ("exact", "strict", "native"):
        faults = {(p.a, p.b): fault for p in left if (fault := getattr(p, f"{mode}_fault"))}
        for reason, count in Counter(faults.values()).most_common():
            example = next(pair for pair, fault in faults.items() if fault == reason)
            rows.append({"mode": mode, "reason": reason, "pairs": count, "example": " x ".join(example)})
        left = [p for p in left if (p.a, p.b) not in faults]
    return rows


def _product(a_text: str, b_text: str, capability: tuple[int, int] | None) -> Product:
    a, b = parse(a_text), parse(b_text)
    wrong = mathematical_fault(a, b)
    strict = wrong or hardware_fault(a, b)
    native = strict or fault(a, b, capability)
    with_product = [c for c in _capabilities() if not (strict or fault(a, b, c))]
    exact = None if wrong else str(gemm_plan(a, b, capability))
    return Product(
        a=a_text,
        b=b_text,
        exact=exact,
        exact_fault=wrong,
        strict_fault=strict,
        native_fault=native,
        native=None if native else plan_text(capability) if capability else exact,
        native_on=tuple(map(_sm, with_product)),
        untried=tuple(_sm(c) for c in with_product if c[0] in UNTRIED),
    )


def _capabilities() -> list[tuple[int, int]]:
    """The first capability of each major that has products: 8.9 for major 8."""
    return [(major, 9 if major == 8 else 0) for major in CUDA_KINDS]


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


FOUND = {True: "yes", False: "no", None: "broken"}
STYLES = {True: "", False: "dim", None: "red"}
LEGEND = (
    "N native: on the tensor cores of this machine (gemm=native); high precision has one plan in every mode.  S strict:"
    " exact here, and some tensor cores take the pair.  x exact only: no hardware GEMM takes the pair.  - none."
)


CARDS = {
    "A100": (8, 0), "A40": (8, 6), "RTX3090": (8, 6), "L4": (8, 9), "L40S": (8, 9), "RTX4090": (8, 9), "H100": (9, 0),
    "H200": (9, 0), "GH200": (9, 0), "B200": (10, 0), "GB200": (10, 0), "B300": (10, 3), "GB300": (10, 3),
    "RTX5090": (12, 0), "CPU": None,
}  # fmt: skip
"""Card -> compute capability, from NVIDIA's table (developer.nvidia.com/cuda-gpus)."""
FIRST = ("cpu", "cpu kernels", "torch", "gpu", "cuda kernels")
"""The parts that a short page shows with details."""
WIDTH = 80
"""Characters of a line of the short page, but for long names of formats."""


def doctor(card: str | None = None, *, every: bool = False) -> tuple[RenderableType, dict[str, Any]]:
    """(page, document): the machine's parts, every pair of formats, and why a pair has no product in a mode.

    card: answer for a GPU of CARDS in the place of this machine's. every: the page has all of the document; without it
    at most 12 lines. Raises UserError for an unknown card.
    """
    name = None if card is None else _card(card)
    capability = capability_here() if name is None else CARDS[name]
    machine, pairs = parts(), products(capability)
    why = reasons(pairs)
    document = {
        "card": name,
        "machine": {part.what: {"found": part.present, "detail": part.detail} for part in machine},
        "products": [{"mode": pair.mode, **asdict(pair)} for pair in pairs],
        "reasons": why,
    }
    if not every:
        return Group(*(Text(line) for line in _short(machine, pairs, name, capability))), document
    heads = [Text(_as_line(name, capability))] if name else [_machine(machine)]
    return Group(*heads, _matrix(pairs), Text(LEGEND), Text(), _native(pairs), _why(why)), document


def _card(card: str) -> str:
    """The key of CARDS that a word means."""
    known = {name.lower(): name for name in CARDS}
    word = (
        card.lower().replace(" ", "").replace("-", "").replace("_", "").removeprefix("nvidia").removeprefix("geforce")
    )
    if word not in known:
        raise UserError(f"--as: no card '{card}'{nearest(card.upper(), CARDS)}; there are {', '.join(CARDS)}")
    return known[word]


def _as_line(name: str, capability: tuple[int, int] | None) -> str:
    return f"as on {name}{'' if capability is None else f' ({_sm(capability)})'}, which need not be here"


def _short(
    machine: list[Part], pairs: list[Product], name: str | None, capability: tuple[int, int] | None
) -> list[str]:
    """At most 12 lines."""
    alike = {p.a: p for p in pairs if p.a == p.b}
    native = [text for text in formats.NAMES if text in alike and alike[text].mode == "native"]
    high = [text for text in native if parse(text).high_precision]
    untried = [text for text in native if text not in high and capability and _sm(capability) in alike[text].untried]
    lines = [_as_line(name, capability)] if name else _parts_lines(machine)
    lines += [f"{'native':<13}{', '.join(native)}"]
    lines += [f"{'':<13}from documents, not yet run there: {', '.join(untried)}"] if untried else []
    none = Counter(pair.mode for pair in pairs)["none"]
    return [
        *lines,
        f"{'exact':<13}{len(pairs) - none} of {len(pairs)} pairs of formats, on any device, the same bytes",
        f"{'no product':<13}{none} pairs, which have a Hadamard transform on one side alone",
        "--all: every part with its reason, and every pair; --as B200: another card",
    ]


def _parts_lines(machine: list[Part]) -> list[str]:
    named = {part.what: part for part in machine}
    lines = [
        f"{what:<13}{'' if (part := named[what]).present else f'{FOUND[part.present]}: '}{part.detail}"
        for what in FIRST
    ]
    others = [part for part in machine if part.what not in FIRST]
    for said, found in (("also here", True), ("not here", False), ("broken", None)):
        names = [part.what for part in others if part.present is found]
        lines += [f"{said:<13}{', '.join(names)}"] if names else []
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines]


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
