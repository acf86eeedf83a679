"""Types of the JSON and YAML documents of a run, so that readers use them without further checks.

An error names the file and the fault, where another program wrote to it or a part never reached the disk. Keys without
a type here may hold any JSON. Pydantic checks the types, and gives their JSON Schemas.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError
from typing_extensions import TypeAliasType

from hqsweep.errors import Damaged
from hqsweep.sweep.store.files import LARGEST, REPAIRED, shown, writable

Text = Annotated[str, Field(min_length=0)]
"""Text that can be encoded: JSON may hold one half of a surrogate pair, which pydantic sees where it counts
characters."""
Integer = Annotated[int, Field(gt=-LARGEST, lt=LARGEST)]
Number = Integer | InstanceOf[float]
"""NaN, infinity and integers count as numbers."""
Plain = TypeAliasType(
    "Plain",
    Annotated[
        "Text | InstanceOf[bool] | Integer | InstanceOf[float] | list[Plain] | dict[Text, Plain] | None",
        Field(union_mode="left_to_right"),
    ],
)
"""Anything that JSON has. YAML's dates, sets, and keys other than text are faults."""
Mapped = dict[Text, Plain]
State = Literal["failed", "finished", "interrupted", "pending", "running"]


class Document(BaseModel):
    """A mapping of keys. A key with a default may be absent; keys that the class lacks hold anything plain."""

    model_config = ConfigDict(extra="allow", strict=True, defer_build=True)
    __pydantic_extra__: dict[Text, Plain]


class Progress(Document):
    """Progress of a run. part: the finished part of the work, from 0 to 1. first: the step at which a fork begins."""

    step: Integer
    steps: Integer
    part: Number | None = None
    first: Integer | None = None
    loss: Number | None = None
    tokens_per_s: Number | None = None
    eta_s: Number | None = None


class Status(Document):
    """status.json"""

    state: State = "pending"
    reason: Text | None = None
    exit_code: Integer | None = None
    pid: Integer | None = None
    host: Text | None = None
    attempt: Integer = 0
    started: Number | None = None
    ended: Number | None = None
    seconds: Number = 0
    progress: Progress | None = None
    phase: Text | None = None


class Met(Document):
    """A row of the manifest's "nonfinite" (train.nonfinite)."""

    slot: Text
    lost: bool
    first: Integer
    order: Integer
    sentence: Text


class Manifest(Document):
    """manifest.json"""

    run_id: Text = ""
    sweep: Text = ""
    arm: Text = ""
    seed: Integer = 0
    job: Text = ""
    overrides: Annotated[list[Text], Field(default_factory=list)]
    trunk: Text | None = None
    point: Integer | None = None
    warnings: Annotated[list[Text], Field(default_factory=list)]
    repairs: Annotated[list[Text], Field(default_factory=list)]
    gemm_plan: Annotated[Mapped, Field(default_factory=dict)]
    recipe_schedule: Annotated[list[Mapped], Field(default_factory=list)]
    data_hash: Text | None = None
    kernel_digest: Text | None = None
    versions: Annotated[Mapped, Field(default_factory=dict)]
    device: Text = ""
    host: Text | None = None
    started: Number | None = None
    params: Integer | None = None
    tokens: Integer | None = None
    epochs: Number | None = None
    steps: Annotated[Mapped, Field(default_factory=dict)]
    diff: Text = ""
    system: Annotated[dict[Text, Number], Field(default_factory=dict)]
    nonfinite: Annotated[list[Met], Field(default_factory=list)]


MOST_MET = 8


class Quantizers(Document):
    """A section of a recipe: the canonical text of each tensor's quantizer."""

    input: Text | None = None
    weight: Text | None = None
    grad_output: Text | None = None
    qkv: Text | None = None
    s: Text | None = None
    do: Text | None = None
    dp: Text | None = None


class RecipeSection(Document):
    """The section recipe of a config."""

    name: Text | None = None
    qfactory: Text | None = None
    gemm: Text | None = None
    linear: Quantizers | None = None
    grouped_linear: Quantizers | None = None
    dpa: Quantizers | None = None
    head: Quantizers | None = None
    overrides: list[Mapped] | None = None
    schedule: list[Mapped] | None = None


class Fork(Document):
    """The section fork of a config, as far as it is read without its types."""

    noise: Number | None = None


class Model(Document):
    """The section model of a config, as far as it is read without its types."""

    init_noise: Number | None = None


class Stats(Document):
    """The section stats of a config."""

    every: Integer | None = None


class Track(Document):
    """The section track of a config."""

    kind: Text | None = None
    mode: Text | None = None
    project: Text | None = None
    entity: Text | None = None
    init_timeout_s: Number | None = None
    system_s: Number | None = None
    diff: bool = False


class Config(Document):
    """config.yaml"""

    job: Text = ""
    seed: Integer = 0
    recipe: RecipeSection | None = None
    fork: Fork | None = None
    data: Mapped | None = None
    model: Model | None = None
    train: Mapped | None = None
    stats: Stats | None = None
    track: Track | None = None
    engine: Mapped | None = None


class Trained(Document):
    """The keys of the section train that losses are counted over."""

    steps: Integer
    batch: Integer
    context: Integer


class Job(Document):
    """job.json: the id of the scheduler's job that has the run."""

    id: Text


SCHEMAS: dict[str, type[Document]] = {"status": Status, "manifest": Manifest, "config": Config, "job": Job}


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a run's "status", "manifest", "config" or "job" document."""
    return SCHEMAS[name].model_json_schema()


def check_document(
    path: Path, document: Any, kind: type[Document], required: Iterable[str] = (), remedy: str = REPAIRED
) -> dict[str, Any]:
    """Return the document, which was read from `path`, unchanged. Raises Damaged for another value than a mapping, a
    missing key of `required`, and a value of another type than in `kind`, at any depth."""
    if not isinstance(document, dict):
        raise Damaged(path, f"holds {shown(document)} where a mapping of keys belongs", remedy)
    if lacking := [key for key in required if key not in document]:
        raise Damaged(path, f"has no key '{lacking[0]}'", remedy)
    try:
        kind.model_validate(document)
    except ValidationError as error:
        raise Damaged(path, _sentence(error, document), remedy) from None
    return document


def met_lines(manifest: Mapping[str, Any]) -> list[str]:
    """Sentences about the slots of a run that have met NaN or inf: the first ones, and how many more there are."""
    rows = manifest.get("nonfinite", [])
    more = len(rows) - MOST_MET
    return [row["sentence"] for row in rows[:MOST_MET]] + [f"{more} more slots have met NaN or inf"] * (more > 0)


WANTED = {
    "int_type": "an integer", "less_than": "an integer", "greater_than": "an integer", "string_type": "text",
    "string_unicode": "text", "bool_type": "true or false", "list_type": "a list", "dict_type": "a mapping",
    "model_type": "a mapping",
}  # fmt: skip
"""Pydantic's type of a fault -> the kind of value that belongs there."""


def _sentence(error: ValidationError, document: dict[Any, Any]) -> str:
    """The deepest fault in words. A union has a fault for each of its types; the one of mappings comes last."""
    placed = [(*_place(fault, document), fault) for fault in error.errors(include_url=False)]
    path, value, fault = max(reversed(placed), key=lambda each: len(each[0]))
    where, kind = ".".join(map(str, path)), fault["type"]
    if kind == "missing":
        return f"has no key '{'.'.join(map(str, fault['loc']))}'"
    if isinstance(value, dict) and _is_of_key(fault):
        odd = next(key for key in value if not (isinstance(key, str) and writable(key)))
        inside = f" in '{where}'" if where else ""
        return f"has {shown(odd)} as a key{inside}, where text belongs"
    types = {each[2]["type"] for each in placed if each[0] == path}
    wanted = f"one of {fault['ctx']['expected']}" if kind == "literal_error" else WANTED.get(kind, "another value")
    if {"list_type", "dict_type"} <= types:
        wanted = "text, a number or null"
    elif "is_instance_of" in types:
        wanted = "a number"
    return f"has {shown(value)} under '{where}', where {wanted} belongs"


def _is_of_key(fault: Mapping[str, Any]) -> bool:
    """Whether a fault is of a key, and not of the value under it."""
    return fault["type"] == "invalid_key" or fault["loc"][-1:] in ((), ("[key]",))


def _place(fault: Mapping[str, Any], document: Any) -> tuple[tuple[int | str, ...], Any]:
    """(path of keys to the value at fault, the value). Names of types in the fault's place are no keys; of a key that
    is at fault the value is the mapping."""
    loc, path, value = fault["loc"], [], document
    if _is_of_key(fault):
        loc = loc[: -1 if fault["type"] == "invalid_key" else -2]
    for part in loc:
        inside = isinstance(value, dict) and part in value
        if inside or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            path, value = [*path, part], value[part]
    return tuple(path), value
