"""The product of each pair of formats on a device: by which plan it runs, or why not.

exact   gemm=exact: any two formats on any device, except products that no arithmetic gets right.
strict  gemm=strict: as exact, for pairs that some hardware GEMM takes.
native  gemm=native: on the tensor cores of the device.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import torch

from hqsweep import formats
from hqsweep.formats import parse
from hqsweep.gemm.native import CUDA_KINDS, UNTRIED, fault, gemm_plan, plan_text
from hqsweep.recipe.pairs import hardware_fault, mathematical_fault


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
        native_on=tuple(map(sm_name, with_product)),
        untried=tuple(sm_name(c) for c in with_product if c[0] in UNTRIED),
    )


def _capabilities() -> list[tuple[int, int]]:
    """The first capability of each major that has products: 8.9 for major 8."""
    return [(major, 9 if major == 8 else 0) for major in CUDA_KINDS]


def sm_name(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"
