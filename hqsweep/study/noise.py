"""The registry of noise: how much one replicate's gap varied in earlier studies, for planning the next one.

RUNS_DIR/noise.jsonl has one row for each (model, data, tokens, design), renewed by each comparison of a finished study.
A verdict never reads it: a study whose noise is assumed instead of measured claims falsely as soon as it is louder
than the assumption (9 to 20 % of null studies at a variance 6 times as large).

A row (parameters count matrices, tokens are tokens of training):
    model, params     the section `model` of the baseline without its noise; parameters
    data, data_hash   the section `data`, and the hash of what it led to
    tokens            of a run from step 1, the trunk's included; of forks, the mean over points
    design            "whole run" or "fork"
    points            fork points a replicate, 1 of whole runs
    ends_together     whether forks of several points end at one step: a replicate's gap is then the whole run's
    baseline, arms    its name, and of each other arm {"sd", "sd_pct" (of one replicate's gap; nats, % of the baseline's
                      loss), "gap_pct", "null"}; of forks a replicate's gap is the mean over its points
    sd, sd_pct        root mean square over the arms that are not the null arm
    slope_pct         % that a doubling of tokens takes off the baseline's loss, null where that is not known
    replicates        that were judged together, at least 2
    run_tokens        of one arm in one replicate: of a whole run, or of all its forks
    trunk_tokens      of a replicate's trunk, 0 of whole runs
    seconds           of one more replicate in all of the study's arms, at as many runs at a time as it had
    arms_run          arms that these are, baseline and null arm included
    trained           whether no run of the study was barely trained, as a comparison says it (report.notes); a forecast
                      uses no other rows
    device, date (UTC), sweeps, runs (SHA-256 of the run ids, sorted)
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from hqsweep.config.job import ConvergenceConfig, grouped_shapes, linear_shapes, parse
from hqsweep.config.model import UserModel
from hqsweep.errors import Damaged
from hqsweep.host import Busy, locked, write_whole
from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.frames import DATA, FORK, common_end
from hqsweep.report.compare.notes import barely_trained
from hqsweep.sweep.store.files import encode_rows, read_rows
from hqsweep.sweep.store.run_dir import RunDir

FILE = "noise.jsonl"
KEY = ("model", "data_hash", "tokens", "design")
LEAST = 2
"""The least number of replicates for a standard deviation."""
LOCK_WAIT_S = 10.0


def record(comparison: Comparison, runs_dir: Path) -> Path | None:
    """Put the noise of a comparison's families into runs_dir/noise.jsonl, in place of rows of the same key; a study
    that was barely trained takes the place of no other one. Returns the file; None where no family has LEAST replicates
    in every arm and data that are known, or where it cannot be written: a plan can do without, and a comparison does
    not end for it."""
    rows, path = measured(comparison), runs_dir / FILE
    if not rows:
        return None
    try:
        with locked(path.with_name(f".{FILE}.lock"), LOCK_WAIT_S):
            written = [row for row in read_rows(path) if isinstance(row, dict) and row.keys() >= set(KEY)]
            stay = {_key(row) for row in written if row.get("trained")}
            rows = [row for row in rows if row["trained"] or _key(row) not in stay]
            keys = set(map(_key, rows))
            write_whole(path, encode_rows([*(row for row in written if _key(row) not in keys), *rows]))
    except (OSError, Busy, Damaged):
        return None
    return path


def measured(comparison: Comparison) -> list[dict[str, Any]]:
    """The rows of a comparison, one for each baseline; of rows with one key the last stays."""
    rows = {}
    for baseline in dict.fromkeys(comparison.baseline_of.values()):
        arms = [arm for arm, other in comparison.baseline_of.items() if other == baseline and arm != baseline]
        noise = _noise(comparison, arms)
        if noise and _is_known(comparison, baseline):
            row = _row(comparison, baseline, noise)
            rows[_key(row)] = row
    return list(rows.values())


def _is_known(comparison: Comparison, baseline: str) -> bool:
    """Whether it is known which data the runs of a family have read; a comparison has runs on the same alone."""
    runs = comparison.frames.runs
    return bool(runs[(runs["arm"] == baseline) & (runs["state"] == "finished")][DATA].notna().all())


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps([row[name] for name in KEY], sort_keys=True)


def _noise(comparison: Comparison, arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Arm -> the noise of its replicates; {} where they are fewer than LEAST."""
    points = _shared(comparison.points, arms)
    weighed = points.assign(**{name: points[name] * points["weight"] for name in ("gap", "gap_pct")})
    means = weighed.groupby(["arm", "trunk"], sort=False)[["gap", "gap_pct"]].sum()
    null = comparison.arms.set_index("arm")["null"]
    spreads = {}
    for arm in (arm for arm in arms if arm in means.index):
        gaps = means.loc[arm]
        if len(gaps) < LEAST:
            return {}
        sd, sd_pct = (float(gaps[name].std()) for name in ("gap", "gap_pct"))
        spreads[arm] = {"sd": sd, "sd_pct": sd_pct, "gap_pct": float(gaps["gap_pct"].mean()), "null": bool(null[arm])}
    return spreads


def _shared(points: pd.DataFrame, arms: Iterable[str]) -> pd.DataFrame:
    """The rows of these arms at the trunks and points that all of them that have some have."""
    own = points[points["arm"].isin(set(arms))]
    count = own.groupby(["trunk", "draw"])["arm"].transform("nunique")
    return own[count == own["arm"].nunique()]


def _row(comparison: Comparison, baseline: str, noise: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    frames, points = comparison.frames.runs, _shared(comparison.points, noise)
    runs = frames[(frames["arm"] == baseline) & (frames["state"] == "finished")]
    config = parse(RunDir(Path(runs["path"].iloc[0])).config(), recorded=True)
    forks = points["draw"].nunique() if comparison.design == FORK else 1
    tested = [arm for arm in noise.values() if not arm["null"]] or list(noise.values())
    trunks, step = comparison.trunks.runs, config.train.batch * config.train.context
    fork_steps = runs["config.train.steps"] - runs["point"]
    return {
        "model": model_of(config),
        "params": _parameters(config, runs),
        "data": config.data.model_dump(mode="json", exclude={"hash"}),
        "data_hash": runs[DATA].iloc[0],
        "tokens": round(float(runs["config.train.steps"].mean()) * step),
        "design": comparison.design,
        "points": int(forks),
        "ends_together": common_end(frames) is not None,
        "baseline": baseline,
        "arms": dict(noise),
        "sd": _rms(arm["sd"] for arm in tested),
        "sd_pct": _rms(arm["sd_pct"] for arm in tested),
        "slope_pct": _slope(comparison, baseline),
        "replicates": int(points["trunk"].nunique()),
        "run_tokens": round(float(fork_steps.mean()) * step * forks),
        "trunk_tokens": round(float(trunks["config.train.steps"].mean()) * step) if len(trunks) else 0,
        "seconds": 60 * float(comparison.arms["replicate_minutes"].iloc[0]),
        "arms_run": len(comparison.arms),
        "trained": not bool(barely_trained(frames, comparison.finals).any()),
        "device": runs["manifest.device"].iloc[0],
        "date": datetime.now(UTC).date().isoformat(),
        "sweeps": sorted(frames["sweep"].unique()),
        "runs": hashlib.sha256("\n".join(sorted(frames["run_id"].astype(str))).encode()).hexdigest(),
    }


def _slope(comparison: Comparison, baseline: str) -> float | None:
    """The cell slope_pct of a row."""
    own = comparison.arms.set_index("arm").loc[baseline]
    percent = 100 * own["slope"] / own["final_loss"]
    return float(percent) if math.isfinite(percent) else None


def model_of(config: ConvergenceConfig) -> dict[str, Any]:
    """The section `model` without its noise, and without the path of a Hugging Face model."""
    model = config.model.model_copy(update={"init_noise": 0.0}).model_dump(mode="json")
    return model | {"path": None} if "path" in model else model


def _parameters(config: ConvergenceConfig, runs: pd.DataFrame) -> int:
    """The parameters() of the model that the runs had, which may be gone since."""
    return int(runs["manifest.params"].iloc[0]) if isinstance(config.model, UserModel) else parameters(config)


def parameters(config: ConvergenceConfig) -> int | None:
    """The number of parameters in the model's matrices, without the embedding; of a user's model all, None where it
    cannot be built here."""
    model = config.model
    if isinstance(model, UserModel):
        from hqsweep.models import build  # not for a GPT

        return build.parameters(config)
    linears = sum(wide * high for _, wide, high in linear_shapes(model, config.data.vocab_estimate))
    return linears + model.experts * sum(wide * high for _, wide, high in grouped_shapes(model))


def _rms(values: Iterable[float]) -> float:
    squares = [value**2 for value in values]
    return math.sqrt(sum(squares) / len(squares))
