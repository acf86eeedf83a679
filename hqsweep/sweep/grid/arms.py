"""The points of a grid, each of which is one run, and the names of their arms, as in mxfp8_input-nvfp4_lr-0.002.

GridPoint is a run as composition gives it; Grid has all of them, and the study that they are for.

A label is the same as arm, beginning of a run's folder, legend of a plot and word of --baseline. So it has neither
spaces nor characters with a meaning to a shell or a file system. If one label of a grid is long, all of its labels take
a shorter form (grad, dq; then x, w and dy for the operands of a linear). Labels that are still too long are cut, and
get a hash.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.types import Override, Quote, QuotedString

from hqsweep.config.study import LONGEST, StudyConfig
from hqsweep.errors import UserError

LARGEST = 20_000
"""The most runs of a sweep. Its composition takes about a minute."""


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One run of a grid.

    config: resolved, as plain dicts and lists. overrides: all given ones, with this point's choices. changed: the swept
    ones among them. arm: the label of the run's recipe in this sweep, equal for all seeds. settings: the end of the
    label, which names swept keys outside the recipe. whole: whether the recipe is unchanged. trunk: for a fork, its run
    of the same grid.
    """

    config: dict[str, Any]
    overrides: tuple[str, ...]
    changed: tuple[str, ...]
    arm: str
    settings: str = ""
    whole: bool = True
    trunk: "GridPoint | None" = None

    @property
    def variant(self) -> str:
        """The arm without its settings. Arms of other variants at the same settings are paired by it."""
        return self.arm.removesuffix(self.settings)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The runs of a sweep in the order of the grid, the keys of the sweep as a whole, and the reason for its baseline.

    The reason is "" without a comparison.
    """

    points: list[GridPoint]
    study: StudyConfig
    baseline_why: str = ""


def check_size(count: int, what: str) -> None:
    """UserError, before anything is composed, for more runs than a sweep can have."""
    if count > LARGEST:
        raise UserError(
            f"{what}: {count:,} runs at least, and a sweep has at most {LARGEST:,}; give fewer values, or split them"
            " into sweeps with names of their own (sweep=NAME)"
        )


def section(point: GridPoint, key: str) -> dict[str, Any]:
    """A section of an unchecked config; {} where it is missing."""
    section = point.config.get(key)
    return section if isinstance(section, dict) else {}


def is_trunk(point: GridPoint) -> bool:
    """Whether the run is a trunk of a fork study, and so of no arm."""
    fork = section(point, "fork")
    return bool(fork) and fork.get("trunk") is None


def without(overrides: Sequence[str], key: str) -> list[str]:
    """The overrides of all other keys."""
    return [text for text in overrides if text.lstrip("+").partition("=")[0] != key]


K = TypeVar("K")
Pair = tuple[str, str]
"""The key and the value of an override, as text."""
FACTORY_KEYS = ("recipe._target_", "recipe.qfactory")
"""The keys of a Python factory, which stands for the whole recipe, and is its name where recipe.name gives no other."""
LEAST = 16
"""The least number of characters for changed fields after a recipe's name, however long that is."""
_FIELD = re.compile(r"^recipe\.(linear\.)?")
_PLAIN = re.compile(r"[\w.+@|/-]+")
_SHORT = {"grad_output": "grad", "grouped_linear": "grouped", "dequantized": "dq"}
_LETTERS = _SHORT | {"input": "x", "weight": "w", "grad_output": "dy"}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The description of an arm: a name, the fields that differ from its recipe, and settings.

    The name is its recipe's or its own. Settings lie outside of recipes; whole families of arms differ in them.
    """

    name: str
    fields: tuple[Pair, ...] = ()
    settings: tuple[Pair, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Label:
    """The label, and the end of it that names the settings."""

    arm: str
    settings: str


def labels(differences: Iterable[Difference]) -> dict[Difference, Label]:
    """Difference -> a unique label, of LONGEST characters at most, except for recipes with long names."""
    asked = list(dict.fromkeys(differences))
    last = Counter(_last(key) for key in {key for own in asked for key, _ in own.settings})
    bodies, ends = {}, {}
    for form in (_whole, _abbreviated, _lettered):
        bodies = {(own.name, own.fields): own.name + _text(own.fields, form, last) for own in asked}
        ends = {own.settings: _text(own.settings, form, last) for own in asked}
        if all(len(bodies[own.name, own.fields] + ends[own.settings]) <= LONGEST for own in asked):
            break
    ends = _told_apart(ends, dict.fromkeys(ends, max(LONGEST // 2, LONGEST - _longest(bodies))))
    room = LONGEST - _longest(ends)
    bodies = _told_apart(bodies, {key: max(room, len(key[0]) + LEAST) for key in bodies})
    return {
        own: Label(arm=bodies[own.name, own.fields] + ends[own.settings], settings=ends[own.settings]) for own in asked
    }


def _text(pairs: Sequence[Pair], form: Callable[[Sequence[Pair]], list[Pair]], last: Mapping[str, int]) -> str:
    return "".join(
        f"_{key}-{value}"
        for key, value in form([(_key(key, last), _plain(_named(key, value))) for key, value in pairs])
    )


def _told_apart(texts: Mapping[K, str], room: Mapping[K, int]) -> dict[K, str]:
    """Return the texts, cut to their room if they are longer. A cut or ambiguous text gets a hash."""
    counts = Counter(texts.values())
    return {
        key: text if len(text) <= room[key] and counts[text] == 1 else f"{text[: room[key] - 5]}_{_digest(key)}"
        for key, text in texts.items()
    }


def _longest(texts: Mapping[Any, str]) -> int:
    return max(map(len, texts.values()), default=0)


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:4]


def _key(key: str, last: Mapping[str, int]) -> str:
    """The short form of a key: a field without "recipe." and "recipe.linear.", another key by its last part if no other
    ends so."""
    if key.startswith("recipe."):
        return _FIELD.sub("", key)
    return _last(key) if last[_last(key)] == 1 else key


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _named(key: str, value: str) -> str:
    """A value: of a model's path the folder's name alone. Another model of that name gets another label
    (_told_apart)."""
    if key != "model.path":
        return value
    path = Path(value.strip("'\""))
    return path.parent.name if path.suffix == ".json" else path.name


def _plain(value: str) -> str:
    """A value in the characters of a folder's name: nvfp4|mxfp8@rowwise_dequantized is nvfp4-mxfp8-dequantized."""
    value = value.strip("'\"").replace("@rowwise_dequantized", "-dequantized")
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", value).rstrip("-") or "none"


def _whole(pairs: Sequence[Pair]) -> list[Pair]:
    return list(pairs)


def _abbreviated(pairs: Sequence[Pair]) -> list[Pair]:
    return [(_replaced(key, _SHORT), _replaced(value, _SHORT)) for key, value in pairs]


def _lettered(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs with the operands of a linear as x, w and dy, operands of one value together."""
    short = [(_replaced(key, _LETTERS), _replaced(value, _SHORT)) for key, value in pairs]
    joined: dict[str, str] = {}
    for key, value in short:
        same = next((k for k in joined if joined[k] == value and {*k, key} <= {"x", "w"}), None)
        if same is not None:
            joined = {k + key * (k == same): v for k, v in joined.items()}
        else:
            joined[key] = value
    return list(joined.items())


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for word, short in words.items():
        text = re.sub(rf"(?<![a-z]){word}(?![a-z])", short, text)
    return text


def difference(
    arm: str,
    config: Mapping[str, Any],
    choice: Sequence[str],
    swept: Sequence[str],
    compose: Callable[[Sequence[str]], Mapping[str, Any]],
) -> Difference:
    """The Difference of a point of a grid: `arm`, or else recipe.name, or the job where there is no recipe; and all
    that was swept except the seed. choice: its overrides, of which `swept` took several values; compose makes a config
    of some.

    A field of the recipe is left out where the value is the recipe's own anyway, so that the point of a grid that
    changes nothing has the recipe's name alone.
    """
    recipe = config.get("recipe")
    name = arm or (recipe.get("name") if isinstance(recipe, dict) else config.get("job"))
    pairs = [text.lstrip("+").partition("=")[::2] for text in swept]
    in_name = () if arm else ("recipe", *FACTORY_KEYS)
    pairs = [(key, value) for key, value in pairs if key not in ("seed", *in_name)]
    fields = {key for key, _ in pairs if key.startswith("recipe.")}
    if fields:
        try:
            own = compose([text for text in choice if text.lstrip("+").partition("=")[0] not in fields])
        except UserError:  # without the swept values it may be incomplete
            own = {}
        pairs = [(key, value) for key, value in pairs if key not in fields or _leaf(own, key) != value]
    return Difference(
        name=str(name),
        fields=tuple(pair for pair in pairs if pair[0] in fields),
        settings=tuple(pair for pair in pairs if pair[0] not in fields),
    )


def _leaf(config: Any, key: str) -> Any:
    """The value of a dotted key in plain containers; None for a missing key."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def check_arm(arm: str, own: Mapping[str, Override], common: Mapping[str, Override], whole: Collection[str]) -> None:
    """UserError for overrides of an arm that a sweep names, by key, which no arm can have: several values, a key that
    is in `common`, the overrides of all arms, or one that begins with a part in `whole`, the keys of a sweep as a
    whole."""
    for key, override in own.items():
        text = f"arms.{arm}: '{override.input_line}'"
        if override.is_sweep_override():
            raise UserError(f"{text} has several values; an arm has one of each key, so name another arm")
        if key.split(".")[0] in whole:
            raise UserError(f"{text}: {key} cannot differ between arms, it belongs to the whole sweep")
        if key in common:
            raise UserError(
                f"override '{common[key].input_line}': arm '{arm}' says {override.input_line}; leave one of them out,"
                " or give arms=null to take the sweep without its arms"
            )


def override_texts(overrides: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """The overrides of an arm that a sweep's YAML names: as they stand, or from a mapping of keys to values."""
    if isinstance(overrides, Mapping):
        return [f"{key}={_written(value)}" for key, value in _leaves(overrides)]
    return list(overrides)


def _leaves(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _written(value: Any) -> str:
    """A value of a YAML in Hydra's grammar."""
    return Override._get_value_element_as_str(_quoted(value))


def _quoted(value: Any) -> Any:
    if isinstance(value, Mapping):  # in a list
        return {key: _quoted(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_quoted(entry) for entry in value]
    plain = not isinstance(value, str) or _PLAIN.fullmatch(value)
    return value if plain else QuotedString(text=value, quote=Quote.single)
