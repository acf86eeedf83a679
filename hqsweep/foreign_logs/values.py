"""From the rows of a log to one value for each run: the last value of the metric, or its mean over the trailing window.

The columns that say arm, seed, step, trunk and fork point are found by usual names, or named by the user. Without a
column of seeds the names of runs are read, as bf16-s0.

Rows come in pieces. Of each run only those stay that may be in its window, so that memory is bounded by windows and not
by the log. A run that ends at another step than most is left out by name, because its loss belongs to another
training time. Means are over steps that all runs have.

Curves are thinned while they are read, so that they fit a page and all runs keep the same steps. A step stays if it is
a whole number of strides from the first step of the log. The stride doubles whenever too many rows are kept, so that
the steps kept earlier include all steps kept later.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from hqsweep.errors import UserError, nearest
from hqsweep.report.compare.curves import trailing
from hqsweep.report.compare.families import listed

FILE = "file"
"""The column that several files, or a folder of them, have in addition: the name of the row's file without its end."""
USUAL = {
    "arm": ("arm", "recipe", "variant", "config", "group", "name", "run", FILE),
    "seed": ("seed",),
    "step": ("step", "_step", "global_step", "iteration"),
    "trunk": ("trunk",),
    "point": ("point", "fork_point"),
}
"""What a column says -> its usual names, in any case; the first one that is there counts."""
METRIC = "val_loss"
"""The metric that is judged where none is asked for and the log has it."""
SHOWN_NAMES = 12
"""The number of columns that an error names."""
_SEED = re.compile(
    r"(?P<before>.*?)(?:^|(?<=[-_./\s]))s(?:eed)?[-_=:\s]?(?P<seed>\d+)(?=$|[-_./\s])(?P<after>.*)", re.I
)
_EDGES = "-_./ \t"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The names of columns; None for one that the log lacks, and for arms that its reader knows otherwise.

    Without `seed` and `trunk` the texts of `arm` are names of runs, which have the seed in them."""

    arm: str | None
    seed: str | None
    step: str | None
    trunk: str | None
    point: str | None
    metric: str

    @property
    def keys(self) -> dict[str, str]:
        """What tells runs apart, forks included: arm, replicate (seed or trunk) and draw (fork point) -> column."""
        named = {"arm": self.arm, "replicate": self.trunk or self.seed, "draw": self.point if self.trunk else None}
        return {what: name for what, name in named.items() if name}

    @property
    def read(self) -> list[str]:
        """All columns that are read but the metric."""
        return [*self.keys.values(), *([self.step] if self.step else [])]


def find(
    known: Mapping[str, bool], where: str, asked: Mapping[str, str | None], metric: str | None, *, open_ended: bool
) -> Columns:
    """The columns of a log.

    known       its columns, and whether each holds numbers
    asked       arm, seed, step, trunk or point -> the name that the user gives
    open_ended  whether metrics are names within a column, and so not among `known`

    Raises UserError, which begins with `where` and names the columns, if one is missing.
    """
    found = {what: _column(known, where, what, asked.get(what)) for what in USUAL}
    if found["arm"] is None:
        raise UserError(
            f"{where}: no column of arms, by a usual name ({', '.join(USUAL['arm'][:-1])}); it has {_named(known)};"
            " name one with --arm-column, or call it arm"
        )
    rest = [name for name, number in known.items() if number and name not in found.values()]
    if metric is None and METRIC not in known and not open_ended:
        if len(rest) != 1:
            several = f"it has {_named(rest)}; give one with --metric" if rest else f"it has {_named(known)}"
            raise UserError(f"{where}: no column '{METRIC}', and no other one that is the metric; {several}")
        metric = rest[0]
    metric = metric or METRIC
    if metric not in known and not open_ended:
        raise UserError(f"{where}: no column of the metric '{metric}'{nearest(metric, rest)}; it has {_named(known)}")
    if taken := next((what for what, name in found.items() if name == metric), None):
        raise UserError(f"{where}: '{metric}' is the column of the {taken}, and no metric")
    return Columns(**found, metric=metric)


def _column(known: Iterable[str], where: str, what: str, asked: str | None) -> str | None:
    if asked is not None:
        if asked not in known:
            raise UserError(
                f"{where}: --{what}-column: no column '{asked}'{nearest(asked, known)}; it has {_named(known)}"
            )
        return asked
    by_name = {name.strip().casefold(): name for name in reversed(list(known))}
    return next((by_name[usual] for usual in USUAL[what] if usual in by_name), None)


def _named(names: Iterable[str]) -> str:
    names = [f"'{name}'" for name in names]
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more if names else "no column"


def arm_and_seed(run: str) -> tuple[str, str] | None:
    """("nvfp4", "1") of the name of a run, such as nvfp4-s1, nvfp4_seed1, seed=1/nvfp4; None without a seed."""
    match = _SEED.fullmatch(run)
    if match is None:
        return None
    before, after = match["before"].rstrip(_EDGES), match["after"].lstrip(_EDGES)
    arm = f"{before}/{after}" if before and after else before or after
    return (arm, str(int(match["seed"]))) if arm else None


LOWER = {"loss", "nll", "ppl", "perplexity", "bpb", "bpc", "err", "error", "mse", "mae", "rmse", "wer", "cer", "fid"}
HIGHER = {"acc", "accuracy", "reward", "return", "score", "f1", "bleu", "rouge", "auc", "psnr", "pass", "em"}
"""Words in the names of metrics that say which direction is better."""


def lower_is_better(metric: str) -> bool:
    """Whether lower values of a metric are better, by the words of its name. Raises UserError if they do not say."""
    words = set(re.findall(r"[a-z]+\d*", metric.casefold()))
    if bool(words & LOWER) == bool(words & HIGHER):
        raise UserError(
            f"metric '{metric}': its name does not say which direction is better; give --lower-is-better or"
            " --higher-is-better (in Python lower_is_better=True or False)"
        )
    return bool(words & LOWER)


MOST_ROWS = 100_000
"""The rows that are kept of all runs together."""


class Curves:
    """Takes rows in pieces."""

    def __init__(self, most: int = MOST_ROWS) -> None:
        self._most, self._stride, self._first = most, 1.0, math.nan
        self._kept = pd.DataFrame({"run": np.array([], np.int64), "step": [], "value": []})

    def add(self, rows: pd.DataFrame) -> None:
        """Take rows with columns run (a number), step and value."""
        if rows.empty:
            return
        if math.isnan(self._first):
            self._first = float(rows["step"].min())
        self._kept = pd.concat([self._kept, self._on_stride(rows)], ignore_index=True)
        while len(self._kept) > self._most and self._stride < 2**60:
            steps = np.unique(np.abs(self._kept["step"].to_numpy() - self._first))
            whole = steps[np.isfinite(steps)].round().astype(np.int64)
            self._stride = max(2 * self._stride, 2.0 * np.gcd.reduce(whole))
            self._kept = self._on_stride(self._kept)

    def _on_stride(self, rows: pd.DataFrame) -> pd.DataFrame:
        if self._stride == 1:
            return rows[np.isfinite(rows["step"])]
        return rows[(rows["step"] - self._first) % self._stride == 0]

    def rows(self, runs: pd.DataFrame) -> pd.DataFrame:
        """The kept rows: arm, replicate, draw, step, value; of two rows of a step the later one. `runs` has arm,
        replicate and draw, and the numbers of runs as its index."""
        kept = self._kept[self._kept["run"].isin(runs.index)].drop_duplicates(["run", "step"], keep="last")
        named = runs[["arm", "replicate", "draw"]].loc[kept["run"]].reset_index(drop=True)
        return pd.concat([named, kept[["step", "value"]].reset_index(drop=True)], axis=1)


def means(rows: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    """arm, step, mean, lowest, highest and runs (their number), at the steps that all runs of the arm have; where no
    step is in all of them, at every step."""
    finite = rows[np.isfinite(rows["value"]) & rows["arm"].isin(arms)]
    by_step = finite.groupby(["arm", "step"])["value"].agg(["mean", "min", "max", "count"])
    frame = by_step.reset_index().set_axis(["arm", "step", "mean", "lowest", "highest", "runs"], axis=1)
    most = frame.groupby("arm")["runs"].transform("max")
    return frame[frame["runs"] == most].reset_index(drop=True)


ROLES = ("arm", "replicate", "draw")
"""The columns of a piece that tell runs apart."""
MOST_RUNS = 100_000
SHOWN = 3
"""The number of runs that a sentence names; the others are counted."""
NAMES_OF_RUNS = ("name", "run", FILE)
"""Usual names of columns of arms that may hold an arm and a seed."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """runs: arm, replicate, draw and value of every run that has one, NaN for one that is not finite; `last` is what
    the log has there. curves: arm, replicate, draw, step and value, as many as fit a page; empty without steps.
    left_out, notes: sentences on what does not enter, and on how values were made."""

    runs: pd.DataFrame
    curves: pd.DataFrame
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


class Collector:
    """Takes the pieces of a log."""

    def __init__(self, where: str, columns: Columns, window: float | None) -> None:
        self._where, self._columns, self._window = where, columns, window
        self._ids: dict[tuple[str, str, str], int] = {}
        self._kept = pd.DataFrame({"run": np.array([], np.int64), "step": [], "value": []})
        self._nameless = 0
        self._curves = Curves()

    def add(self, rows: pd.DataFrame) -> None:
        """Keep the rows that may be in the window of their run."""
        keys = [name for name in ROLES if name in rows]
        named = rows[keys].notna().all(axis=1)
        self._nameless += int((~named).sum())
        rows = rows[named & rows["step"].notna()]
        order = rows.groupby(keys, observed=True, sort=False).ngroup().to_numpy()
        _, first = np.unique(order, return_index=True)
        ids = np.array([self._id(*key) for key in rows[keys].iloc[first].itertuples(index=False)], np.int64)
        kept = pd.DataFrame({"run": ids[order], "step": rows["step"].to_numpy(), "value": rows["value"].to_numpy()})
        self._kept = _ending(pd.concat([self._kept, _ending(kept, self._window)], ignore_index=True), self._window)
        if self._columns.step:
            self._curves.add(kept)

    def _id(self, arm: object, replicate: object = "", draw: object = "") -> int:
        known = self._ids.setdefault((_text(arm), _text(replicate), _text(draw)), len(self._ids))
        if known > MOST_RUNS:
            keys = ", ".join(f"'{name}'" for name in self._columns.keys.values())
            raise UserError(
                f"{self._where}: more than {MOST_RUNS:,} runs by the columns {keys}; name others with --arm-column and"
                " --seed-column"
            )
        return known

    def values(self, any_length: bool = False) -> Values:
        """The values of all runs; any_length: also of runs that end at another step than most.

        Raises UserError where there is no row, no seed, or a step of a run with two different values.
        """
        runs = pd.DataFrame([*self._ids], columns=[*ROLES])
        unnamed = runs["arm"].eq("") | (runs["replicate"].eq("") & bool(self._columns.trunk or self._columns.seed))
        rows = self._kept[~self._kept["run"].isin(runs.index[unnamed])]
        nameless = self._nameless + len(self._kept) - len(rows)
        if rows.empty:
            raise UserError(f"{self._where}: no row has a value of '{self._columns.metric}'")
        runs = self._named(runs[~unnamed].copy())
        rows, notes = self._single(rows, runs)
        left_out = [f"{nameless} row{'s' * (nameless > 1)} without an arm or seed."] if nameless else []
        if not any_length:
            rows, early = _of_one_length(rows, runs)
            left_out += early
        means, gaps = _means(rows, runs, any_length or self._window is None)
        return Values(
            runs=runs.assign(value=means, last=rows.groupby("run")["value"].last()).loc[means.index],
            curves=self._curves.rows(runs.loc[means.index]),
            left_out=tuple(left_out), notes=(*notes, *gaps),
        )  # fmt: skip

    def _named(self, runs: pd.DataFrame) -> pd.DataFrame:
        """Runs with the arm and seed that the names of runs say, where the log has no column of seeds, or has the same
        seeds as the names."""
        columns = self._columns
        if columns.trunk or (columns.seed and columns.arm.strip().casefold() not in NAMES_OF_RUNS):
            return runs
        said = [arm_and_seed(name) for name in runs["arm"]]
        if columns.seed is None:
            if None in said:
                name = runs["arm"].iloc[said.index(None)]
                raise UserError(
                    f"{self._where}: no column of seeds, and no seed in '{name}', as in bf16-s0; name a column with"
                    " --seed-column, or call it seed"
                )
        elif None in said or any(both[1] != seed for both, seed in zip(said, runs["replicate"], strict=True)):
            return runs
        runs["arm"], runs["replicate"] = zip(*said, strict=True)
        return runs

    def _single(self, rows: pd.DataFrame, runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
        """The rows in order, each step of a run once."""
        merged = runs.groupby([*ROLES], sort=False).ngroup()
        first = merged.drop_duplicates()
        rows = rows.assign(run=rows["run"].map(merged).map(pd.Series(first.index, first.to_numpy())))
        rows = _ending(rows, self._window)
        doubled = int(rows.duplicated().sum())
        rows = rows.drop_duplicates()
        same = rows[rows.duplicated(["run", "step"], keep=False)]
        if len(same):
            run, step = same.iloc[0][["run", "step"]]
            values = same[(same["run"] == run) & (same["step"] == step)]["value"].tolist()
            at = f"two values at step {step:g}" if self._columns.step else "two rows and there is no column of steps"
            raise UserError(
                f"{self._where}: {_run(runs.loc[run], self._columns)} has {at} ({values[0]!r} and {values[1]!r}); take"
                " one of them out"
            )
        notes = (
            []
            if not doubled
            else [f"{doubled} row{'s repeat others and count' if doubled > 1 else ' repeats another and counts'} once."]
        )
        return rows.sort_values(["run", "step"], ignore_index=True), notes


def _ending(rows: pd.DataFrame, window: float | None) -> pd.DataFrame:
    """The rows in the window of their run, of which the last row so far is the end; None: the last step alone."""
    if window is not None:
        return trailing(rows, window)
    return rows[rows["step"] == rows.groupby("run")["step"].transform("max")]


def _text(cell: object) -> str:
    """A key's text: 0, 0.0 and "0" are one seed."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return str(cell).strip()


def _run(run: pd.Series, columns: Columns) -> str:
    """ "seed 1 of 'bf16'", "trunk 0 at 600 of 'bf16'"."""
    at = f" at {run['draw']}" if run["draw"] else ""
    return f"{'trunk' if columns.trunk else 'seed'} {run['replicate']}{at} of '{run['arm']}'"


def several(texts: Sequence[str]) -> str:
    """The first SHOWN texts, and the number of the others."""
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def _of_one_length(rows: pd.DataFrame, runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The rows of the runs that end at the step at which most runs of their draw end, the later one of two; and a
    sentence on the others."""
    last = rows.groupby("run")["step"].max()
    draws = runs["draw"].loc[last.index]
    usual = last.groupby(draws).agg(lambda ends: ends.mode().max())
    odd = last[last != draws.map(usual)]
    if odd.empty:
        return rows, []
    texts = [f"'{runs.at[run, 'arm']}' {runs.at[run, 'replicate']} at {step:g}" for run, step in odd.items()]
    ends = ", ".join(f"{step:g}" for step in sorted(set(usual)))
    which = "1 run that ends" if len(odd) == 1 else f"{len(odd)} runs that end"
    said = f"{which} elsewhere than at step {ends}: {several(texts)}."
    return rows[~rows["run"].isin(odd.index)], [said]


def _means(rows: pd.DataFrame, runs: pd.DataFrame, each: bool) -> tuple[pd.Series, list[str]]:
    """(run -> the mean of its rows, a sentence on steps that only some runs have); NaN for a run with a value that is
    not finite. `each`: over the steps of each run, else over those that all runs of its draw have."""
    finite = np.isfinite(rows["value"]).groupby(rows["run"]).all()
    if each:
        return rows.groupby("run")["value"].agg(lambda values: values.mean(skipna=False)).where(finite), []
    rows, missing, means = rows[rows["run"].map(finite)], set(), [pd.Series(np.nan, finite.index[~finite])]
    for _, of_draw in rows.groupby(rows["run"].map(runs["draw"])):
        table = of_draw.pivot(index="step", columns="run", values="value")
        missing |= set(table.index[table.isna().any(axis=1)])
        means.append(table.dropna().apply(lambda values: values.mean()))
    means = pd.concat(means).sort_index()
    if not missing:
        return means, []
    more = f", and {len(missing) - SHOWN} more," if len(missing) > SHOWN else ""
    steps = listed("step", [f"{step:g}" for step in sorted(missing)[:SHOWN]])
    return means, [f"{steps} of the window{more} is missing in some runs and enters no mean."]
