"""The keys that a growing study states before its first run, and keeps: the level of its verdicts holds for these
alone."""

from collections.abc import Mapping
from typing import Any

from hqsweep.config.study import StudyConfig
from hqsweep.errors import UserError
from hqsweep.sweep.store.store import RunStore

STATED = ("seeds.until", "seeds.max", "margin", "baseline")


def check_stated(store: RunStore, sweep: str, study: StudyConfig) -> None:
    """UserError where a sweep has begun to run as a growing study, or is to go on as one, and was stated otherwise."""
    if not (store.root / sweep / "sweep.json").is_file():
        return
    now = study.model_dump(mode="json")
    before = StudyConfig().model_dump(mode="json") | store.facts(sweep).get("study", {})
    if "decided" not in (now["seeds"]["until"], before["seeds"]["until"]):
        return
    other = next((key for key in STATED if _value(now, key) != _value(before, key)), None)
    if other is None or all(run.seen()["state"] in ("pending", "missing") for run in store.runs(sweep)):
        return
    raise UserError(
        f"{other}: {_value(now, other)}, but '{sweep}' began to run with {other}={_value(before, other)}, and what a"
        f" study that grows until it is decided states before its first run stays; give that, or another sweep=NAME"
    )


def _value(study: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        study = study[part]
    return study
