"""The types of what each command prints with --json, and their JSON Schemas, which `hqsweep schema COMMAND` prints.

A command without an entry here has no --json. NaN and infinity are null in JSON, so every float may be null.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model

from hqsweep.errors import UserError, nearest
from hqsweep.report.compare.left_out import LeftOut
from hqsweep.report.gate.gate import Verdict
from hqsweep.sweep.store.documents import Config, Manifest, Status
from hqsweep.sweep.store.seen_data import SeenData

Number = float | None
Word = Literal["worse", "better", "equivalent", "undecided"]


class Answer(BaseModel):
    """A mapping of these keys, and of no others."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Open(Answer):
    """A mapping that may have more keys, whose values are numbers, texts, true, false or null."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | str | bool | None]


def _of(kind: type) -> Any:
    """The type of the dict of a dataclass."""
    fields = {field.name: (_nullable(field.type), ...) for field in dataclasses.fields(kind)}
    return create_model(kind.__name__, __base__=Answer, __doc__=kind.__doc__, **fields)


def _nullable(kind: Any) -> Any:
    return Number if kind is float else kind


Left = _of(LeftOut)


class Look(Answer):
    """The verdicts of a growing study after some replicates."""

    replicates: int
    maximum: int
    verdicts: dict[str, str]
    added: int | None
    half_pct: dict[str, Number] | None
    """Arm -> half of its interval in %, of a study that goes on until it is settled."""
    margin_pct: Number
    """How large a half may be."""


class Design(Open):
    """A design of `plan`: replicates and minutes that resolve the gap; null beyond 1000."""

    design: str
    arms: int
    maximum: int | None
    replicates: Number
    minutes: Number
    half_width: Number
    sd_pct: Number
    basis: str
    estimate: bool


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


class Result(Answer):
    """A run of `run`."""

    run: str
    arm: str | None
    seed: int | None
    point: int | None
    """The step at which a fork leaves its trunk."""
    state: str
    val_loss: Number
    """The last one, in nats."""
    tokens_per_s: Number
    seconds: float
    reason: str | None
    path: str
    warnings: list[str]
    parity: dict[str, int]
    calibrate: dict[str, int]


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


class Arm(Open):
    """An arm beside the baseline: gaps and intervals in % of the baseline's loss, gap_nats in nats, p two-sided."""

    arm: str
    verdict: Word
    gap: Number
    ci_low: Number
    ci_high: Number
    margin: Number
    n: int
    """Seeds or trunks."""
    p: Number
    within_margin: bool | None
    needed: Number
    more: Number
    apart: str | None
    """Why the arm is not judged with the others."""


class Effect(Answer):
    """An effect of a factorial study, in % of the baseline's loss: of one factor, or of two beyond the sum of each."""

    effect: str
    order: int
    pct: Number
    low: Number
    high: Number
    p: Number
    n: int
    resolved: bool
    aliases: str
    """Effects of one or two factors that no arm tells apart from this one."""


class Compared(Answer):
    effects: list[Effect] | None = None
    """Of a factorial study."""
    arms: list[Arm]
    baselines: list[dict[str, Any]]
    unit: str
    margin: float
    margin_tokens: Number
    design: str
    baseline: str
    baseline_why: str
    notes: list[str]
    left_out: list[Left]


class Ranked(Answer):
    """A row of the league: an arm, its bits of an element, and its speed where its formats run natively."""

    place: Number
    arm: str
    verdict: str
    gap_pct: Number
    ci_low_pct: Number
    ci_high_pct: Number
    slowdown_pct: Number
    bits: Number
    front: bool
    """Whether no other arm has fewer bits and a smaller gap."""
    tokens_per_s: Number
    speed: Number


class Report(Compared):
    league: list[Ranked] | None = None
    """With --league."""
    report: str
    """The path of the page."""
    paper: list[str]
    check: str | None


class Decided(Compared):
    """`run` of a study that grows, or for a stated time."""

    runs: list[Result]
    looks: list[Look] | None = None


class Timed(Answer):
    """`run --until` where nothing can be compared yet."""

    runs: list[Result]
    looks: list[Look] | None = None


class JudgedArm(Open):
    arm: str
    verdict: Word
    gap: Number
    ci_low: Number
    ci_high: Number
    eq_low: Number
    eq_high: Number
    margin: Number
    metric_gap: Number
    p: Number
    n: int
    needed: Number
    more: Number
    within_margin: bool | None
    mean: Number
    null: bool
    sentence: str
    apart: str | None


class Judged(Answer):
    arms: list[JudgedArm]
    baseline: str
    baseline_mean: Number
    metric: str
    lower_is_better: bool
    unit: str
    margin: Number
    design: str
    notes: list[str]
    left_out: list[Any]
    report: str | None
    """The path of the page, with --out."""
    stored: str | None
    """The file of the stored baseline, with --store."""


class Gated(Answer):
    outcome: Literal["no baseline", "regression", "failed", "undecided", "pass"]
    unit: str
    metric: str | None = None
    """The metric of foreign logs."""
    arms: list[_of(Verdict)]
    replicates: str
    margin: Number
    problem: str | None
    left_out: list[Left]
    end: int | None = None
    """The steps of the whole runs whose gaps are judged, where forks end together."""


class Stored(Answer):
    arm: str
    seed: int
    point: int
    stored: Number
    now: Number
    gap: Number
    change: str


class Updated(Answer):
    path: str
    rows: list[Stored]
    draws: int
    note: str
    refused: bool


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
    data: list[_of(SeenData)]


class Plan(Answer):
    resolve_pct: float
    designs: list[Design]
    cheaper: str
    not_used: list[str]


class Noise(Answer):
    """The noise of an arm's gap over n replicates, and how many find, or show equal, the gap to resolve."""

    arm: str
    sd: Number
    n: int
    find: Number
    equal: Number


class PlanOfLogs(Answer):
    """`plan --from LOGS`."""

    resolve: float
    unit: str
    metric: str
    design: str
    baseline: str
    arms: int
    noise: list[Noise]
    notes: list[str]


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


class Span(Answer):
    """Of one law, in % of the baseline's loss."""

    gap_pct: Number
    low: Number
    high: Number


class Check(Answer):
    """The largest size, in %, and its prediction from the smaller ones."""

    measured: Number
    low: Number
    high: Number
    covered: bool


class Predicted(Answer):
    """An arm at the size that was asked for: gap and its interval in % of the baseline's loss."""

    arm: str
    verdict: Word
    gap_pct: Number
    low: Number
    high: Number
    laws: dict[str, Span]
    disagree: bool
    eff_n: Number
    eff_n_low: Number
    eff_n_high: Number
    eff_d: Number
    eff_d_low: Number
    eff_d_high: Number
    sizes: int
    held_out: Check | None
    sentence: str


class Size(Answer):
    """A measured gap of an arm at one size."""

    design: str
    arm: str
    params: Number
    tokens: Number
    n: int
    gap_pct: Number
    se_pct: Number
    loss: Number
    """The baseline's, in nats."""


class Laddered(Answer):
    design: str
    params: Number
    tokens: Number
    margin: Number
    arms: list[Predicted]
    measured: list[Size]
    warnings: list[str]
    report: str


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
