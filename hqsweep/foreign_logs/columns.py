"""The columns of a log that say arm, seed, step, trunk and fork point, and its metric.

They are found by usual names, or named by the user. Without a column of seeds the names of runs are read, as bf16-s0.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hqsweep.errors import UserError, nearest

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
SHOWN = 12
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
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else "no column"


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
