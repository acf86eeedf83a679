"""The types of what each command prints with --json, and their JSON Schemas, which `hqsweep schema COMMAND` prints.

A command without an entry here has no --json. NaN and infinity are null in JSON, so every float may be null.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import TypeAdapter

from hqsweep.cli.verdict_answers import (
    Answer,
    Decided,
    Gated,
    Judged,
    Laddered,
    Look,
    Number,
    Open,
    Plan,
    PlanOfLogs,
    Report,
    Result,
    Updated,
    dict_of,
)
from hqsweep.errors import UserError, nearest
from hqsweep.sweep.store.documents import Config, Manifest, Status
from hqsweep.sweep.store.seen_data import SeenData


class Said(Answer):
    note: str
    tags: list[str]


class ListedSweep(Answer):
    sweep: str
    conf: str
    created: str
    """UTC, as ISO 8601."""
    overrides: list[str]
    arms: list[str]
    study: dict[str, Any]
    runs: int
    trunks: int
    forks: int
    states: dict[str, int]
    """State -> how many runs are in it."""
    notes: dict[str, Said]
    """Name of a run, "" for the sweep -> what was noted of it."""
    faults: list[str]
    """A sentence for each run that is damaged, missing or foreign."""


class ShownRun(Answer):
    """A run of `show SWEEP`."""

    run: str
    arm: str | None
    seed: int | None
    point: int | None
    state: str
    step: int | None
    steps: int | None
    loss: Number
    """In nats."""
    reason: str | None


class ShownSweep(ListedSweep):
    runs: list[ShownRun] | int
    """The number of runs alone where the list of runs is damaged."""


class Curve(Answer):
    metric: str | None
    values: list[Number]
    last_step: int | None


class Shown(Answer):
    """`show RUN`."""

    run: str
    path: str
    status: Status
    manifest: Manifest
    config: Config
    loss: Curve
    worst_sqnr: list[dict[str, Any]]
    what_if: list[dict[str, Any]]
    exact_tiles: list[dict[str, Any]]
    note: str
    tags: list[str]


class Planned(Open):
    """A run of `run --dry-run`."""

    run: str
    arm: str
    seed: int
    point: int | None = None
    trunk: str | None = None
    changed: list[str]
    config: dict[str, Any]
    state: str
    minutes: Number


class Timed(Answer):
    """`run --until` where nothing can be compared yet."""

    runs: list[Result]
    looks: list[Look] | None = None


class StatusRow(Answer):
    run: str
    state: str
    step: str | None
    """Such as 30/200, or the work before the first step."""
    loss: Number
    tokens_per_s: Number
    seconds: float
    job: str | None
    """The id of its Slurm job."""
    reason: str | None


class Fault(Answer):
    file: str
    fault: str
    remedy: str


class Verified(Answer):
    runs: int
    faults: list[Fault]
    sealed: list[str]
    data: list[dict_of(SeenData)]


class RecipeRow(Answer):
    name: str
    input: str
    weight: str | None
    grad_output: str | None
    parts: dict[str, str]
    same_as: str | None


class Slot(Answer):
    slot: str
    rowwise: str
    columnwise: str
    columnwise_source: str
    rowwise_reads: list[str]
    columnwise_reads: list[str]
    projection: str | None


class Recipe(Answer):
    name: str
    recipe: dict[str, Any]
    slots: list[Slot]
    gemms: dict[str, str]


class Difference(Answer):
    slot: str
    field: str
    a: str | None
    b: str | None


class Checkpoint(Answer):
    path: str
    kind: str
    step: int | None
    optimizer: Literal["none", "named", "indexed"]
    parameters: int
    problems: list[str]
    notes: list[str]
    tensors: dict[str, dict[str, Any]]


class Split(Answer):
    tokens: int
    bytes: int
    files: int
    documents: int | None


class Shards(Answer):
    path: str
    layout: str
    dtype: str
    vocab_size: int | None
    hash: str
    split: str
    train: Split
    val: Split
    separator: dict[str, Any] | None = None
    tokenizer: dict[str, Any] | None = None
    source: dict[str, Any] | None = None
    unigram_entropy_nats: Number = None
    bytes_per_token: Number = None
    sample: str | None


class ProbedRow(Open):
    tensor: str
    file: str
    shape: list[int]
    dtype: str
    quantizer: str
    direction: str
    format: str
    bits: float
    sqnr_db: Number
    note: str | None


class Probed(Answer):
    rows: list[ProbedRow]
    skipped: dict[str, Any]
    recipe: dict[str, Any] | None
    bits: Number = None
    predicted_sqnr_db: Number = None
    pairs: Any = None
    use: str | None = None


class Found(Answer):
    found: bool | None
    """null: the probe itself failed."""
    detail: str


class Machine(Answer):
    card: str | None
    """The card that --as names."""
    machine: dict[str, Found]
    products: list[dict[str, Any]]
    reasons: list[dict[str, Any]]


class Versions(Answer):
    versions: dict[str, str | None]
    platform: str
    isa: str
    kernel_build: dict[str, Any] | None


ANSWERS: Mapping[str, Any] = {
    "run": list[Result] | list[Planned] | Decided | Timed,
    "ls": list[ListedSweep],
    "show": Shown | ShownSweep,
    "status": list[StatusRow],
    "query": list[dict[str, Any]] | dict[str, list[str]],
    "compare": Report,
    "ladder": Laddered,
    "judge": Judged | Gated,
    "plan": Plan | PlanOfLogs,
    "gate": Gated,
    "baseline update": Updated,
    "verify": Verified,
    "cancel": list[str],
    "sync": dict[str, list[str]],
    "note": dict[str, Said],
    "tag": dict[str, Said],
    "rm": dict[str, list[str]],
    "recipe ls": list[RecipeRow],
    "recipe show": Recipe,
    "recipe import": dict[str, Any],
    "recipe diff": list[Difference],
    "checkpoint show": Checkpoint,
    "data prepare": Shards,
    "data show": Shards,
    "probe": Probed,
    "doctor": Machine,
    "version": Versions,
    "schema": dict[str, Any] | list[str],
}
"""Words of a command -> the type of its JSON."""


def schema(command: str) -> dict[str, Any]:
    """The JSON Schema of what a command prints with --json. Raises UserError for a command without."""
    words = " ".join(command.split())
    if words not in ANSWERS:
        raise UserError(
            f"schema: no command '{words}' with --json{nearest(words, ANSWERS)}; there are {', '.join(ANSWERS)}"
        )
    return TypeAdapter(ANSWERS[words]).json_schema() | {"title": f"hqsweep {words} --json"}
