"""`hqsweep probe`: error statistics of the tensors of a safetensors file, and the recipe that they suggest."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hqsweep.cli.output import AsJson, print_result
from hqsweep.errors import UserError


def probe(
    path: Annotated[Path, typer.Argument(metavar="FILE_OR_FOLDER", help="safetensors: a checkpoint, or activations.")],
    formats: Annotated[
        str, typer.Option(metavar="F1,F2,...", help="Formats (not recipes), also as ROW|COL.")
    ] = "mxfp8,nvfp4",
    bits: Annotated[
        float | None, typer.Option(min=1, help="Suggest the recipe of least error with this mean of bits an element.")
    ] = None,
    pairs: Annotated[
        Literal["strict", "any"],
        typer.Option(help="Suggest operands that hardware multiplies (strict), or any that gemm=exact emulates."),
    ] = "strict",
    out: Annotated[Path | None, typer.Option(metavar="RECIPE.yaml", help="Write the suggested recipe there.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write all rows as CSV.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with a heatmap.")] = None,
    as_json: AsJson = False,
) -> None:
    """Which layers can take nvfp4? Errors of every tensor of a file.

    Every matrix is quantized in every format and in both directions. Files may be larger than memory.
    """
    from hqsweep.jobs.probe.job import parse_quantizers
    from hqsweep.jobs.probe.suggest import recipe_of, suggest
    from hqsweep.jobs.probe.tensor_files import find_matrices
    from hqsweep.report.pages import probe as report
    from hqsweep.report.pages.text import to_rich

    if out and bits is None:
        raise UserError("--out: there is no recipe without a budget; give --bits, such as --bits 6")
    for option, file in (("--out", out), ("--csv", csv), ("--html", html)):
        if file and not file.parent.is_dir():
            raise UserError(f"{option} {file}: its folder does not exist; give a file in a folder that does")
    if out and out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out}: a recipe's file must end in .yaml or .yml, or recipe=PATH does not take it")
    quantizers = parse_quantizers(formats.split(","))
    _check_captured(path)
    matrices, skipped = find_matrices(path)
    rows = _rows(matrices, quantizers)
    document: dict[str, Any] = {"rows": rows, "skipped": dict(skipped), "recipe": None}
    promise = text = use = None
    if bits is not None:
        suggestion = suggest(rows, bits, pairs)
        promise, use = report.summary(suggestion, bits), report.how_to_use(suggestion, out)
        recipe = recipe_of(suggestion, out.stem if out else "suggested")
        text = report.recipe_text(recipe, f"Suggested by hqsweep probe for {path.name}: {promise}", use)
        document |= {"recipe": recipe, "bits": suggestion.bits, "predicted_sqnr_db": suggestion.sqnr_db}
        document |= {"pairs": pairs, "use": use}
    if out and text:
        out.write_text(text, encoding="utf-8")
    if csv:
        report.write_csv(rows, csv)
    if html:
        report.write_html(rows, html, f"probe of {path.name}", text, promise)
    shown = report.worst_rows(rows)
    table = to_rich(report.probe_table(shown), "SQNR in dB: rowwise columnwise (lower 5th percentile of rows)")
    hidden = len(matrices) - len({row["tensor"] for row in shown})
    lines = [f"{hidden} more tensors with less error: --csv has all"] if hidden else []
    lines += [f"{len(skipped)} tensors are no matrices of floating-point numbers"] if skipped else []
    lines += [f"wrote {file}" for file in (out, csv, html) if file]
    lines += [use] if use else []
    print_result(as_json, document, table, *lines, *([text.rstrip()] if text else []))


def _check_captured(path: Path) -> None:
    """Raises Damaged where `path` is a run that has ended, or in one, and what it captured is not what it was then."""
    from hqsweep.sweep.store import seal
    from hqsweep.sweep.store.run_dir import RunDir

    whole = path.resolve()
    for folder in (whole, *whole.parents[:2]):
        files = RunDir(folder).sealed() if (folder / seal.FILE).is_file() else None
        for fault in seal.faults(folder, files) if files is not None else ():
            if Path(fault.file).parent.name == seal.CAPTURED:
                raise fault


def _rows(matrices: Sequence[Any], quantizers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of jobs.probe for all matrices and quantizers; on stderr what it will take, and how far it is."""
    from rich.markup import escape
    from rich.progress import Progress, TimeElapsedColumn

    from hqsweep.jobs.probe.job import expected_seconds, probe
    from hqsweep.sweep.console import SafeConsole
    from hqsweep.sweep.progress import duration

    rows: list[dict[str, Any]] = []
    total = sum(matrix.rows * matrix.cols for matrix in matrices)
    console = SafeConsole(stderr=True)
    seconds = expected_seconds(matrices, quantizers)
    what = f"{len(matrices)} tensors of {total / 1e6:.1f} M elements in {len(quantizers)} formats"
    console.print(f"probe: {what}, about {duration(seconds)}", highlight=False)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, transient=True) as bar:
        task, share = bar.add_task("probe", total=total), 2 * len(quantizers)
        for matrix in matrices:
            bar.update(task, description=escape(matrix.name), refresh=True)
            for row in probe(matrix, quantizers):
                rows.append(row)
                bar.advance(task, matrix.rows * matrix.cols / share)
    return rows
