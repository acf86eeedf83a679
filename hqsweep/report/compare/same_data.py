"""Runs are compared with runs on the same data alone: what has read other data than its baseline is left out and
named."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from hqsweep.errors import Damaged
from hqsweep.report.compare.frames import Frames
from hqsweep.report.compare.left_out import OTHER_DATA, UNKNOWN_DATA, LeftOut
from hqsweep.train.corpus import SHOWN_DIGITS

AGAIN = "compare it with a baseline on the same data, or train it under another sweep=NAME"


def of_one_data(frames: Frames, trunks: Frames, baseline_of: Mapping[str, str]) -> tuple[Frames, Frames]:
    """(runs, trunks) without those that have read other data than the runs of their arm's baseline, which are in
    left_out then. Forks of a trunk on other data are left out with it. Raises Damaged where none is left."""
    out: dict[str, LeftOut] = {}
    wanted: set[str | None] = set()
    for baseline in dict.fromkeys(baseline_of.values()):
        family = frames.runs[frames.runs["arm"].map(baseline_of) == baseline]
        data = _data_of(family, baseline)
        wanted.add(data)
        for run in family.itertuples():
            if entry := _apart(run, seen(run), data, f"'{baseline}' has read"):
                out[run.run] = entry
    first = next(iter(wanted), None)
    for trunk in trunks.runs.itertuples():
        own = seen(trunk)
        if own is not None and None not in wanted and own not in wanted:
            out[trunk.run] = _entry(trunk, OTHER_DATA, own, first, "its forks have read")
            for fork in frames.runs[frames.runs["trunk"] == trunk.trunk].itertuples():
                out.setdefault(fork.run, _entry(fork, OTHER_DATA, seen(fork), own, "its trunk has read"))
    if not out:
        return frames, trunks
    kept = frames.only(frames.runs[~frames.runs["run"].isin(out)])
    if kept.runs.empty:
        lost = next(iter(out.values()))
        raise Damaged(lost.file, f"{lost.fault}, so no run is left to compare", lost.remedy)
    left_out = (*frames.left_out, *out.values())
    return replace(kept, left_out=left_out), trunks.only(trunks.runs[~trunks.runs["run"].isin(out)])


def other_data(run: tuple, known: str | None, whose: str) -> LeftOut:
    """The entry of a run (a row of Frames.runs) that has read other data than `known`; whose: the words before that."""
    return _entry(run, OTHER_DATA, seen(run), known, whose)


def _data_of(family: pd.DataFrame, baseline: str) -> str | None:
    """The hash of the data of most of the baseline's finished runs, of several the first; None where it is not known.
    Where none has finished, that of most runs of the family."""
    own = family[(family["arm"] == baseline) & (family["state"] == "finished")]
    known = list(map(seen, own.itertuples())) or [data for run in family.itertuples() if (data := seen(run))]
    return Counter(known).most_common(1)[0][0] if known else None


def seen(run: tuple) -> str | None:
    """The hash of the data of a row of Frames.runs."""
    data = run.data_seen
    return data if isinstance(data, str) else None


def _apart(run: tuple, own: str | None, data: str | None, whose: str) -> LeftOut | None:
    """The entry of a run that is not on the data of its baseline; None for one that is, or that has read nothing."""
    if own == data:
        return None
    if own is None:
        return _entry(run, UNKNOWN_DATA, own, data, whose) if run.state == "finished" or run.diverged else None
    return _entry(run, OTHER_DATA if data else UNKNOWN_DATA, own, data, whose)


def _entry(run: tuple, state: str, own: str | None, data: str | None, whose: str) -> LeftOut:
    says = f"says data_hash {own[:SHOWN_DIGITS]}" if own else "does not say which data it has read"
    other = f"{whose} {data[:SHOWN_DIGITS]}" if data else f"it is not known what {whose.removesuffix(' has read')} read"
    return LeftOut(
        run=run.run, state=state, file=f"{run.path}/manifest.json", fault=f"{says}, and {other}", remedy=AGAIN
    )
