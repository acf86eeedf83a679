"""The one place from which lists of formats, quantizers and recipes come, derived from the formats that there are and
from the recipes of conf/recipe.

A new format, or a new option of one, is in all of them without another line.
"""

from collections.abc import Callable, Iterable
from itertools import cycle, pairwise, product
from pathlib import Path

import yaml

from hqsweep.formats import Format, bases, parse, spellings, words_of
from hqsweep.formats.spec import NAMES as SPECS
from hqsweep.quant import HybridQuantizer

NAMES = tuple(SPECS)
"""Every format without options."""
LOW = tuple(name for name in NAMES if not parse(name).high_precision)
"""Formats with codes and scales."""
ALL = tuple(text for name in NAMES for text in spellings(name))
"""Every combination of options."""


def _shortest(name: str) -> list[str]:
    """The name, and for each of its options the first text that has it."""
    texts = spellings(name)
    words = dict.fromkeys(word for text in texts for word in words_of(text)[1])
    return [name, *(next(text for text in texts if word in text.split("+")) for word in words)]


def _longest(name: str) -> list[str]:
    """The texts to which no option can be added."""
    sets = {text: set(text.split("+")) for text in spellings(name)}
    return [text for text, words in sets.items() if not any(words < other for other in sets.values())]


def _numbered(name: str) -> list[str]:
    """The name with each option that a number follows."""
    values = {"eps": "16.0", "history": "4"}
    return [f"{name}+{option}{values[option]}" for option in SPECS[name].numbered]


EVERY_OPTION = tuple(
    dict.fromkeys(text for name in NAMES for texts in (_shortest, _longest, _numbered) for text in texts(name))
)
"""Each option with as few others, and with as many others, as it goes with: for tests of a few milliseconds a case."""


def _treatment(text: str) -> tuple:
    """The answers of a format by which code treats it differently from others of its scaling."""
    f = parse(text)
    answers = (f.two_d, f.rht > 0, f.row_scaled, bool(f.four_over_six), f.stochastic, f.delayed, f.fits_bf16)
    return (f.scaling, *answers)


def _representative() -> tuple[str, ...]:
    seen, texts = set(), []
    for text in (text for name in NAMES for text in _shortest(name)):
        if text in NAMES or _treatment(text) not in seen:
            seen.add(_treatment(text))
            texts.append(text)
    return tuple(texts)


WIDE = tuple(text for text in EVERY_OPTION if parse(text).rht > 16)
"""Transforms of more than 16 elements, some of which tests/ops/quantize/test_wide.py takes through the kernels."""
REPRESENTATIVE = _representative()
"""Every name, and one text for each other treatment: for tests of whole tensors and modules."""


COMBINED = tuple(
    text for text in EVERY_OPTION if sum(answer is True for answer in _treatment(text)[1:6]) > 1 and text not in WIDE
)
"""Texts in which two treatments meet, and all other options with them."""
PRODUCTS = tuple(text for text in REPRESENTATIVE if text in NAMES or not parse(text).fits_bf16)
"""Every name, and one text for each other dtype that its operands have in products: for tests of whole layers."""


def bare(recipe):
    """What `recipe=` takes for a format or quantizer in every slot; a text alone may be the name of a recipe."""
    return f"format:{recipe}" if isinstance(recipe, str) else recipe


def both_directions(text: str) -> str:
    """The quantizer with a format in both directions, as far as each may have it."""
    format = parse(text)
    return f"{text}|{format.columnwise_form}" if format.rowwise_only else text


def _pairs(texts: tuple[str, ...], distance: int) -> tuple[str, ...]:
    """Each text once rowwise and once columnwise, every second pair with the columnwise operand made of the rowwise."""

    def pair(row: Format, column: Format, index: int) -> str:
        return f"{row.rowwise_form}|{column.columnwise_form}" + ("@rowwise_dequantized" if index % 2 else "")

    formats = [parse(text) for text in texts]
    order = [formats[i * distance % len(formats)] for i in range(len(formats) + 1)]
    return tuple(pair(row, column, index) for index, (row, column) in enumerate(pairwise(order)))


def _covering(pairs: tuple, kinds: Callable[[object], set]) -> tuple:
    """So few of the pairs that they have all kinds that there are."""
    missing, chosen = set().union(*map(kinds, pairs)), []
    while missing:
        chosen.append(max(pairs, key=lambda pair: len(kinds(pair) & missing)))
        missing -= kinds(chosen[-1])
    return tuple(chosen)


def _kinds(pair: tuple[str, str]) -> set[object]:
    """Each scaling, random bits, and amaxes of rows."""
    return {answer for f in map(parse, pair) for answer in (f.scaling, (f.stochastic, f.row_scaled))}


def _kinds_by_direction(text: str) -> set[object]:
    """Each scaling, and each treatment, of each direction; and the source."""
    q = HybridQuantizer.parse(text)
    directions = {"rowwise": q.rowwise, "columnwise": q.columnwise}
    answers = {(d, each) for d, f in directions.items() for each in (f.scaling, _treatment(str(f))[1:6])}
    return {*answers, q.columnwise_source}


SAME = tuple(map(both_directions, REPRESENTATIVE))
"""Quantizers with one format in both directions."""
HIGH = tuple(name for name in NAMES if name not in LOW)
PAIRS = _covering(_pairs(REPRESENTATIVE, 13), _kinds_by_direction) + tuple(
    f"{row}|{column}@rowwise_dequantized" for row, column in pairwise(HIGH)
)
"""Quantizers with two formats, which have each scaling rowwise and each scaling columnwise."""
QUANTIZERS = SAME + PAIRS
BASES = bases()
BF16_BASES = tuple(name for name in BASES if parse(name).fits_bf16)
"""One format of each scaling whose operands are exact in bfloat16, so that one kernel takes the products of experts."""
LOW_BASES = tuple(name for name in BASES if name in LOW)
"""One format of each scaling of codes."""
FEW = (*BASES, f"{BASES[-1]}|{BASES[-2]}@rowwise_dequantized", f"{BASES[-2]}|{BASES[-1]}")
"""One format of each scaling, and two hybrid quantizers: for tests of seconds."""
SOME = (*FEW, next(text for text in REPRESENTATIVE if parse(text).stochastic))
"""These, and one that draws random bits."""
STATELESS = tuple(text for text in QUANTIZERS if not HybridQuantizer.parse(text).delayed)
"""Quantizers that need no history of amaxes."""
KERNELS = tuple(
    text for text in EVERY_OPTION if parse(text).kernel_fields and not parse(text).delayed and text not in WIDE
)
"""Formats that the compiled extension quantizes without a history, in blocks of any size but WIDE's."""


KERNEL_PAIRS = tuple(
    tuple(text.partition("@")[0].split("|"))
    for text in _pairs(tuple(text for text in REPRESENTATIVE if text in KERNELS), 5)
)
"""Two formats, rowwise and columnwise, both of KERNELS."""
FEW_KERNEL_PAIRS = _covering(KERNEL_PAIRS, _kinds)
"""A few of them: for tests of seconds."""
STOCHASTIC_PAIRS = tuple(
    (str(format.rowwise_form), str(format.columnwise_form))
    for format in map(parse, (*REPRESENTATIVE, *COMBINED))
    if format.stochastic
) + tuple(pair for pair in KERNEL_PAIRS if any(parse(text).stochastic for text in pair))
"""Two formats, of which one or both draw random bits."""


def first(**answers: object) -> str:
    """The first representative text whose format gives these answers, as in first(delayed=True)."""
    formats = ((text, parse(text)) for text in REPRESENTATIVE)
    return next(text for text, f in formats if all(getattr(f, name) == value for name, value in answers.items()))


PLAIN = min((text for text in LOW_BASES if not parse(text).amax_name), key=lambda text: parse(text).tile)
"""The format with codes of which small blocks tell everything: it needs no amax of the whole, and no step."""
RANDOM, DELAYED = first(stochastic=True), first(delayed=True)
"""Formats whose codes depend on the step: by random bits, and by the amaxes of earlier steps."""
BY_STEP = (PLAIN, RANDOM, DELAYED)
"""One format for each thing that a step gives a quantizer: nothing, random bits, amaxes."""
HYBRID = FEW[len(BASES)]
"""One quantizer with two formats, of which the columnwise one is made of the rowwise operand."""
ELEMENTS_OF_MX = tuple(
    next(text for text in EVERY_OPTION if parse(text).scaling == "mx" and parse(text).element_name == element)
    for element in dict.fromkeys(parse(text).element_name for text in EVERY_OPTION if parse(text).scaling == "mx")
)
"""One microscaling format for each element that there is."""
WHOLE_BLOCKS = tuple(name for name in NAMES if parse(name).column_multiple > 1)
"""Names whose last block of a row must be full."""


_RECIPES = sorted((Path(__file__).parents[1] / "conf/recipe").glob("*.yaml"))
PACKAGED = tuple(file.stem for file in _RECIPES)
"""The names of the packaged recipes."""


def _few_packaged() -> tuple[str, ...]:
    """The first recipe of each set of scalings, and all recipes that say more than how linears are quantized."""
    chosen = {}
    for file in _RECIPES:
        recipe = yaml.safe_load(file.read_text())
        key = file.stem
        if recipe.keys() == {"name", "linear"}:
            quantizers = map(HybridQuantizer.parse, recipe["linear"].values())
            key = frozenset(
                (format.scaling, format.delayed) for q in quantizers for format in (q.rowwise, q.columnwise)
            )
        chosen.setdefault(key, file.stem)
    return tuple(chosen.values())


FEW_PACKAGED = _few_packaged()
"""Some of the packaged recipes: for tests of whole models."""


def _recipe_section(name: str) -> dict[str, str] | str:
    """How the first recipe of conf/recipe whose formats all have this name quantizes a linear; or the name alone."""
    for file in _RECIPES:
        section = yaml.safe_load(file.read_text()).get("linear", {})
        texts = set(section.values() if isinstance(section, dict) else [section])
        quantizers = [HybridQuantizer.parse(text) for text in texts]
        if {format.name for q in quantizers for format in (q.rowwise, q.columnwise)} == {name}:
            return section if len(texts) > 1 else texts.pop()
    return name


LINEARS = {name: _recipe_section(name) for name in NAMES}
"""Name of a format -> sections for input, weight and grad_output of a linear, as people train with it."""
BASE_LINEARS = {name: LINEARS[name] for name in BASES} | {"hybrid": HYBRID}
"""One recipe of each scaling, and one with two formats: for tests of trainings and of chains of modules."""
DELAYED_IN_PARTS = {
    tensor: f"{PLAIN}|{text}" if tensor == "weight" else f"{text}|{PLAIN}" for tensor, text in LINEARS[DELAYED].items()
}
"""Delayed scaling in one direction of each tensor, and a plain format in the other."""


def crossed(texts: Iterable[str], *axes: Iterable, whole: Iterable[str] = SOME) -> list[tuple]:
    """Rows (text, a value of each axis): the texts of `whole` with all values, every other text with one, in turn."""
    every = list(product(*axes))
    in_turn = cycle(every)
    return [(text, *values) for text in texts for values in (every if text in whole else [next(in_turn)])]


def fitting(texts: tuple[str, ...], length: int) -> list[str]:
    """The quantizers whose blocks divide a context, or a part of a matrix, of this length."""

    def fits(quantizer: HybridQuantizer) -> bool:
        return all(length % (format.tile[1] or 1) == 0 for format in (quantizer.rowwise, quantizer.columnwise))

    return [text for text in texts if fits(HybridQuantizer.parse(text))]


def attended(texts: tuple[str, ...], length: int) -> list[str]:
    """fitting() for a context of this length, without amaxes of rows, which attention refuses."""
    quantizers = {text: HybridQuantizer.parse(text) for text in fitting(texts, length)}
    return [text for text, q in quantizers.items() if not (q.rowwise.row_scaled or q.columnwise.row_scaled)]
