"""Writes final rows under reports/benchmarks, where they are committed: one JSONL file and one table a benchmark.

    python -m benchmarks.publish ROWS.jsonl ... [--to reports/benchmarks]

Later rows of the same case replace earlier ones, so that a section can be measured again by itself. Every row keeps its
own device, versions and commit; a row without them is refused.
"""

import argparse
import importlib
import json
from pathlib import Path

from benchmarks import step_table
from benchmarks.rows import ROOT, Row, markdown

BENCHMARKS = (
    "step", "startup", "quantize", "grouped", "gemm", "linear", "offload", "sharing", "null_sweeps", "sensitivity",
    "scale", "prepare", "user_model", "ranks", "overlap",
)  # fmt: skip
CONTEXT = ("device", "torch", "hqsweep", "commit")
IDENTITY = (
    "benchmark", "device", "section", "case", "rows", "cols", "threads", "weight", "m", "n", "k", "a", "b", "scale_a",
    "scale_b", "out", "fast", "tokens", "recipe", "dim", "layers", "context", "experts", "weights", "splits",
    "size", "mode", "deterministic", "ranks", "model",
)  # fmt: skip


def read(paths: list[Path]) -> list[Row]:
    """The last row of every case, in the order in which the cases first appeared."""
    latest: dict[tuple, Row] = {}
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            row = json.loads(line)
            missing = [name for name in ("benchmark", *CONTEXT) if name not in row]
            if missing or row["benchmark"] not in BENCHMARKS:
                raise SystemExit(f"{path}:{number}: not a row to publish; missing {missing or 'a known benchmark'}")
            latest[tuple(str(row.get(name)) for name in IDENTITY)] = row
    return list(latest.values())


def page(benchmark: str, rows: list[Row]) -> str:
    """One table a section, under what all rows were measured on."""
    columns = importlib.import_module(f"benchmarks.{benchmark}").COLUMNS
    places = sorted({", ".join(f"{name} {row[name]}" for name in CONTEXT) for row in rows})
    parts = [f"# benchmarks/{benchmark}.py\n", *(f"- {place}" for place in places), ""]
    for section in dict.fromkeys(row["section"] for row in rows):
        chosen = [row for row in rows if row["section"] == section]
        shown = [c for c in columns if c != "section"]
        parts += [f"## {section}\n", markdown(chosen, [*shown, "error"])]
    return "\n".join(parts)


def publish(paths: list[Path], to: Path, guide: Path = step_table.PAGE) -> list[Path]:
    """Write the rows and tables of every benchmark, and the table of steps in the guide; returns the files."""
    to.mkdir(parents=True, exist_ok=True)
    every, written = read(paths), []
    for benchmark in BENCHMARKS:
        rows = [row for row in every if row["benchmark"] == benchmark]
        if not rows:
            continue
        texts = {"jsonl": "".join(json.dumps(row) + "\n" for row in rows), "md": page(benchmark, rows)}
        for suffix, text in texts.items():
            written.append(to / f"{benchmark}.{suffix}")
            written[-1].write_text(text)
        if benchmark == "step":
            step_table.write(rows, guide)
            written.append(guide)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=ROOT / "reports" / "benchmarks")
    args = parser.parse_args()
    for path in publish(args.files, args.to):
        print(path)


if __name__ == "__main__":
    main()
