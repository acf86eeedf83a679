"""A tracker mirrors a run's rows to another place. Without one, a tracker runs that does nothing.

Where the rows of W&B and trackio go is said before a sweep starts, and decided when a run does, without their import.
"""

import functools
import netrc
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

SERVER = "https://api.wandb.ai"


def upload_line(track: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> str | None:
    """The line on uploads of a sweep whose runs have this section track; None where neither W&B nor trackio tracks
    them."""
    if track["kind"] == "trackio":
        place = trackio_server(track, environment)
        shown = f"`trackio show --project {track['project']}` shows the runs"
        return f"trackio: uploading to {place}; track.mode=offline keeps it here" if place else f"trackio: {shown}"
    if track["kind"] != "wandb":
        return None
    mode = track["mode"] if track["mode"] != "auto" else environment.get("WANDB_MODE") or "online"
    if mode == "online" and logged_in(environment):
        entity = track["entity"] or environment.get("WANDB_ENTITY")
        place = "/".join(name for name in (entity, track["project"]) if name)
        return f"W&B: uploading to {place} at {_host(environment)}; track.mode=offline keeps it here"
    if mode in ("online", "offline", "dryrun"):
        return "W&B offline: nothing is uploaded; `hqsweep sync SWEEP --mode online` does that later"
    return f"W&B {mode}: nothing is uploaded"


def trackio_server(track: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """The Space or server to which trackio would upload, by its variables; None for this machine."""
    if track["mode"] == "offline":
        return None
    return environment.get("TRACKIO_SPACE_ID") or environment.get("TRACKIO_SERVER_URL") or None


def resolve_mode(mode: str, environment: Mapping[str, str]) -> str:
    """The configured mode; for auto WANDB_MODE, else online if an API key is there, else offline.

    Online without a key is offline, because W&B would ask for one.
    """
    if mode == "auto":
        mode = environment.get("WANDB_MODE") or ("online" if logged_in(environment) else "offline")
    if mode == "online" and not logged_in(environment):
        print("wandb: no API key (`wandb login` stores one), so this run is tracked offline", flush=True)
        return "offline"
    return mode


def logged_in(environment: Mapping[str, str]) -> bool:
    """Whether W&B has an API key: in WANDB_API_KEY, or in the netrc file for the server. It asks no network."""
    if environment.get("WANDB_API_KEY"):
        return True
    host = _host(environment)
    named = environment.get("NETRC")
    candidates = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in candidates:
        try:
            if (login := netrc.netrc(path).authenticators(host)) and login[2]:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _host(environment: Mapping[str, str]) -> str:
    return urlsplit(environment.get("WANDB_BASE_URL") or SERVER).netloc


SAMPLED = ("sqnr_db", "amax", "underflow_pct", "saturation_pct", "load")
"""Error statistics that are mirrored as curves; all of them are in the table at the end."""


class Tracker(Protocol):
    """The mirror of one run. It never raises once it is open: losing the mirror must not lose the run."""

    def rewind(self, step: int) -> None:
        """The rows after `step` are taken back: before the first row of every attempt, with -1 for an attempt from the
        start."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a step; steps never go down within one process."""

    def sampled(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Rows of the table "stats" of one step, before its metrics."""

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """A table of rows with equal columns, once, at the end."""

    def finish(self, exit_code: int) -> bool:
        """Close the mirror; False when it had to be left behind unfinished."""


class NullTracker:
    """track.kind=none."""

    def rewind(self, step: int) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def sampled(self, step: int, rows: list[dict[str, Any]]) -> None:
        pass

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        pass

    def finish(self, exit_code: int) -> bool:
        return True


def curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Rows of the table "stats" -> SAMPLED by name, STATISTIC/LAYER/TENSOR/DIRECTION, as in
    "sqnr_db/layers.0.attn.qkv/input/rowwise": the first word names the panel. Missing values are left out."""
    return {
        f"{name}/{row['layer']}/{row['tensor']}/{row['direction']}": row[name]
        for name in SAMPLED
        for row in rows
        if row[name] is not None
    }


class HarmlessTracker:
    """Base of trackers whose methods are `harmless`."""

    who: ClassVar[str]
    """The beginning of its lines in the log."""

    def __init__(self) -> None:
        self._complaints: set[str] = set()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As Tracker.log."""
        raise NotImplementedError

    def sampled(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Log the curves() of rows of the table "stats"."""
        self.log(step, curves(rows))

    def complain(self, line: str) -> None:
        """Say it in the log, once."""
        if line not in self._complaints:
            self._complaints.add(line)
            print(f"{self.who}: {line}; the run goes on, its rows are in its folder", flush=True)


def harmless(method: Callable[..., Any]) -> Callable[..., bool]:
    """Whatever the method raises becomes a complaint, and the result False."""

    @functools.wraps(method)
    def guarded(self: HarmlessTracker, *args: Any, **kwargs: Any) -> bool:
        try:
            return method(self, *args, **kwargs) is not False
        except Exception as error:
            self.complain(f"{method.__name__}: {one_line(error)}")
            return False

    return guarded


def one_line(error: Exception) -> str:
    """Type and message of an error without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def verdict_scalars(arm: Mapping[str, Any]) -> dict[str, float]:
    """Tag -> value of an arm: gap_pct, or whole_run_gap_pct where forks end together, both with _low and _high, the
    ends of the 95 % interval; slowdown_pct with its ends; and lasting_pct, the part of the gap that lasts."""
    gap = "gap_pct" if arm.get("end") is None else "whole_run_gap_pct"
    names = {gap: "gap", f"{gap}_low": "ci_low", f"{gap}_high": "ci_high"}
    names |= {name: name for name in ("slowdown_pct", "slowdown_low", "slowdown_high", "lasting_pct")}
    return {tag: arm[name] for tag, name in names.items() if arm.get(name) is not None}
