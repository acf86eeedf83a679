"""Rows of a benchmark: one JSON object a line, each with the device, the versions and the commit it was measured at."""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

import hqsweep
from hqsweep.track import machine

ROOT = Path(__file__).parents[1]
Row = dict[str, object]


def where(device: str, commit: str | None = None) -> Row:
    """Device, versions and commit, on which a number depends beside the case. commit: for a tree without history."""
    build = machine.kernel_build() or {}
    if device == "cuda":
        row: Row = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        row |= {"compiler": build.get("cuda_compiler"), "archs": build.get("cuda_archs")}
    else:
        row = {"device": cpu_model(), "threads": torch.get_num_threads(), "isa": build.get("isa")}
        row |= {"compiler": build.get("compiler")}
    return row | {"torch": torch.__version__, "hqsweep": hqsweep.__version__, "commit": commit or git_commit()}


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name where Linux tells it, else its architecture."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def git_commit() -> str:
    """Short hash of the current directory's commit, "+" when files changed since; "unknown" outside a checkout."""
    state = machine.git_state()
    return state["commit"][:10] + "+" * state["dirty"] if state["commit"] else "unknown"


class Writer:
    """Prints rows as they come, and keeps them. A case that raises becomes a row with the text of its error."""

    def __init__(self, benchmark: str, device: str, args: argparse.Namespace) -> None:
        self.constant = {"benchmark": benchmark} | where(device, args.commit)
        self.file = args.out.open("a") if args.out else None
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        line = json.dumps(row | self.constant)
        print(line, flush=True)
        if self.file:
            print(line, file=self.file, flush=True)

    def attempt(self, named: Row, measure: Callable[[], Row]) -> None:
        """named | measure(), or named and the error; the next case runs all the same."""
        try:
            self.add(named | measure())
        except Exception as error:
            self.add(named | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"})

    @property
    def failed(self) -> bool:
        return any("error" in row for row in self.rows)


def markdown(rows: Iterable[Row], columns: Sequence[str]) -> str:
    """A table of the columns that any row has; a missing value is an empty cell."""
    rows = list(rows)
    shown = [c for c in columns if any(c in row for row in rows)]
    lines = ["| " + " | ".join(shown) + " |", "|---" * len(shown) + "|"]
    lines += ["| " + " | ".join(_cell(row.get(c)) for c in shown) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def add_arguments(parser: argparse.ArgumentParser, sections: Sequence[str]) -> None:
    """Add the options that every benchmark takes."""
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections), help="sections to run")
    parser.add_argument("--out", type=Path, help="append the rows to this file as well")
    parser.add_argument("--commit", help="commit to write in the rows (default: asked of git)")


def finish(writer: Writer, columns: Sequence[str], *, fail: bool = True) -> None:
    """The table of all rows on stderr; exit code 1 when a case failed, unless a failure is a result."""
    print(markdown(writer.rows, [*columns, "error"]), file=sys.stderr)
    if fail and writer.failed:
        raise SystemExit(1)
