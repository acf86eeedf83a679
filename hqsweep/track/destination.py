"""Where the rows of W&B and trackio go, without importing them: said before a sweep starts, and decided when a run
does."""

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
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
