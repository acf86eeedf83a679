"""The types of what compare, judge, gate, plan and ladder print with --json: verdicts and their numbers."""

import dataclasses
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model

from hqsweep.report.compare.left_out import LeftOut
from hqsweep.report.gate.gate import Verdict

Number = float | None


Word = Literal["worse", "better", "equivalent", "undecided"]


class Answer(BaseModel):
    """A mapping of these keys, and of no others."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Open(Answer):
    """A mapping that may have more keys, whose values are numbers, texts, true, false or null."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | str | bool | None]


def dict_of(kind: type) -> Any:
    """The type of the dict of a dataclass."""
    fields = {field.name: (_nullable(field.type), ...) for field in dataclasses.fields(kind)}
    return create_model(kind.__name__, __base__=Answer, __doc__=kind.__doc__, **fields)


def _nullable(kind: Any) -> Any:
    return Number if kind is float else kind


Left = dict_of(LeftOut)


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


class Decided(Compared):
    """`run` of a study that grows, or for a stated time."""

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
    arms: list[dict_of(Verdict)]
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
