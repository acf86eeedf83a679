"""The table of benchmarks/quantize.py: which quantizations are timed, the share of a device copy each must reach, and
the two floors that say what to expect: bytes at the speed of a copy, and instructions at one a clock and scheduler."""

from dataclasses import dataclass
from itertools import product

from hqsweep.formats import Format, parse

EIGHT_BITS = ("mxfp8", "mxfp8+e5m2", "fp8_block", "fp8_current")
HOST_LIMIT_US = 30.0
STATISTICS_LIMIT = 0.10
SECTIONS = ("floors", "single", "pairs", "dequantized", "exact", "statistics", "decode", "host")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One quantization. goal: share of a copy's bandwidth; has_amax: the global amax comes from elsewhere."""

    section: str
    rowwise: str | None = None
    columnwise: str | None = None
    source: str = "original"
    output: str = "codes"
    has_amax: bool = True
    goal: float | None = None

    @property
    def formats(self) -> list[Format]:
        return [parse(text) for text in (self.rowwise, self.columnwise) if text]

    @property
    def name(self) -> str:
        text = f"{self.rowwise or '-'}|{self.columnwise or '-'}"
        text += "@rowwise_dequantized" if self.source != "original" else ""
        text += " exact" if self.output == "exact" else ""
        return text + ("" if self.has_amax else " with amax pass")

    @property
    def passes(self) -> int:
        """The number of times that the input has to be read."""
        needs_amax = any(f.amax_name and not f.delayed for f in self.formats)
        return 2 if needs_amax and not self.has_amax else 1


def single_cases() -> list[Case]:
    """The cases of one format, rowwise, columnwise, both."""

    def directions(text: str, goals: tuple[float, float, float], **options) -> list[Case]:
        row, column, both = goals
        shared = {"section": "single", **options}
        return [
            Case(rowwise=text, goal=row, **shared),
            Case(columnwise=text, goal=column, **shared),
            Case(rowwise=text, columnwise=text, goal=both, **shared),
        ]

    cases = [c for text in ("mxfp8", "fp8_block") for c in directions(text, (0.85, 0.85, 0.85))]
    cases += directions("nvfp4", (0.80, 0.80, 0.70))
    cases += directions("fp8_current", (0.85, 0.85, 0.85))
    cases += directions("nvfp4", (0.85, 0.85, 0.85), has_amax=False)
    cases += directions("fp8_current", (0.85, 0.85, 0.85), has_amax=False)
    cases += directions("fp8_row", (0.85, 0.85, 0.85), has_amax=False)
    cases += [Case(section="single", rowwise="fp8_row", columnwise="fp8_row", goal=0.85)]
    cases += [
        Case(section="single", rowwise="fp8_block+2d", columnwise="fp8_block+2d", goal=0.92),
        Case(section="single", rowwise="mxfp8+2d", columnwise="mxfp8+2d", goal=0.85),
        Case(section="single", rowwise="nvfp4+2d", columnwise="nvfp4+2d", goal=0.75),
        Case(section="single", columnwise="nvfp4+rht", goal=0.60),
        Case(section="single", columnwise="nvfp4+rht+sr", goal=0.60),
        Case(section="single", rowwise="nvfp4", columnwise="nvfp4+rht+sr", goal=0.60),
        Case(section="single", rowwise="mxfp4", columnwise="mxfp4"),
        Case(section="single", rowwise="mxfp4+rht", columnwise="mxfp4+rht"),
        Case(section="single", rowwise="mxfp4", columnwise="mxfp4+rht+sr"),
        Case(section="single", rowwise="nvfp4+rht128", columnwise="nvfp4+rht128"),
        Case(section="single", rowwise="nvfp4+ue5m3", columnwise="nvfp4+ue5m3"),
        Case(section="single", rowwise="nvfp4+e1m2", columnwise="nvfp4+e1m2"),
        Case(section="single", rowwise="int8_block", columnwise="int8_block"),
        Case(section="single", rowwise="int8_row", columnwise="int8_row", has_amax=False),
        Case(section="single", rowwise="mxfp6_e2m3", columnwise="mxfp6_e2m3"),
        Case(section="single", rowwise="nvfp4+4over6", columnwise="nvfp4+4over6"),
    ]
    return cases


def pair_cases(section: str) -> list[Case]:
    """The cases of every ordered pair of 8-bit formats, and of one with nvfp4, from one source."""
    dequantized = section == "dequantized"
    source = "rowwise_dequantized" if dequantized else "original"
    eight, four = (0.80, 0.70) if dequantized else (0.85, 0.75)
    pairs = list(product(EIGHT_BITS, EIGHT_BITS))
    mixed = [p for text in EIGHT_BITS for p in ((text, "nvfp4"), ("nvfp4", text))]
    shared = {"section": section, "source": source}
    return [Case(rowwise=r, columnwise=c, goal=eight, **shared) for r, c in pairs if dequantized or r != c] + [
        Case(rowwise=r, columnwise=c, goal=four, **shared) for r, c in mixed
    ]


def exact_cases() -> list[Case]:
    pairs = [("mxfp8",) * 2, ("fp8_block",) * 2, ("nvfp4",) * 2, ("nvfp4", "mxfp8"), ("fp8_current",) * 2]
    return [Case(section="exact", rowwise=r, columnwise=c, output="exact", goal=0.85) for r, c in pairs]


def all_cases() -> list[Case]:
    return [*single_cases(), *pair_cases("pairs"), *pair_cases("dequantized"), *exact_cases()]


# ---- floors ----------------------------------------------------------------------------------------------------------

SCHEDULERS_PER_SM = 4
LANES = 32

LOAD = 1.2
"""The instructions an element to bring bf16 in: a 16-byte load for 8, widening, its share of the addresses."""
TRANSPOSE = 0.8
"""The instructions an element to transpose: through shared memory as words of two."""


_PER_BLOCK = {
    "tensor": 0.0, "row": 0.0, "int_row": 0.0, "block": 25 / 128, "int_block": 25 / 128, "mx": 15 / 32,
    "nvfp4": 40 / 16, "ue5m3": 40 / 16,
}  # fmt: skip
"""Format.scaling -> the instructions an element that its scales take."""


def encode_instructions(format: Format, output: str) -> float:
    """The instructions an element: amax, product, conversion, packing, store; an estimate from the inner loops."""
    amax = 0.0 if format.scaling in ("tensor", "row", "int_row") else 0.5
    per_block = _PER_BLOCK[format.scaling]
    convert = 1.75  # product, half a conversion instruction, packing
    if format.element_bits == 4:
        convert = 6.0  # product, three roundings, their minimum, shift into place, signs
        convert += 12.0 if format.stochastic else 0.0  # Philox for 16, step, sum
        amax += 6.5 if format.rht else 0.0  # 16 x 4 additions, signs, rounding to bf16
    elif format.element_bits == 6:
        convert += 4.0
    decode = 2.5 if output == "exact" else 0.0
    return amax + per_block + convert + decode + 0.2


def instructions(case: Case) -> float:
    """The estimated instructions an element of X, all passes and directions together."""
    total = LOAD + (case.passes - 1) * 0.7 + sum(encode_instructions(f, case.output) for f in case.formats)
    total += TRANSPOSE if case.columnwise else 0.0
    return total + (2.0 if case.source != "original" else 0.0)


def issue_seconds(per_element: float, elements: int, sms: int, clock_hz: float) -> float:
    """The time of `per_element` instructions an element, with every scheduler issuing in every clock."""
    return per_element * elements / (sms * SCHEDULERS_PER_SM * LANES * clock_hz)
