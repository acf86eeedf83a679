"""`hqsweep probe`: errors of the tensors in a file by format, or the causes of a model's loss in a recipe."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hqsweep.cli import completion as cli_completion
from hqsweep.cli.output import NEXT, AsJson, print_result, say
from hqsweep.errors import UserError

SHOWN = 8
"""The most parts of each kind that are shown."""


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
    data: Annotated[
        Path | None,
        typer.Option(metavar="SHARDS", help="Measure the loss of the model in FILE_OR_FOLDER on these tokens."),
    ] = None,
    recipe: Annotated[
        str, typer.Option(metavar="NAME", help="With --data: the recipe.", autocompletion=cli_completion.recipe_name)
    ] = "nvfp4",
    tokens: Annotated[int, typer.Option(min=16, help="With --data: how many tokens.")] = 1024,
    study: Annotated[
        Path | None, typer.Option(metavar="STUDY.yaml", help="With --data: write a study of treatments there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Which layers can take nvfp4? Errors of every tensor of a file, or causes of a model's loss.

    Every matrix is quantized in every format and in both directions. Files may be larger than memory. With --data the
    loss of a Hugging Face model is measured instead, layer by layer: what a recipe costs at once, and where.
    """
    if data is not None:
        _check_loss_options({"--bits": bits, "--out": out, "--html": html}, csv, study)
        _probe_loss(path, data, recipe, tokens, study, as_json=as_json)
        return
    if study:
        raise UserError("--study: treatments need the loss of a model; give --data SHARDS, of hqsweep data prepare")
    from hqsweep.jobs.probe.job import find_matrices, parse_quantizers
    from hqsweep.jobs.probe.suggest import recipe_of, suggest
    from hqsweep.report.pages import probe as report
    from hqsweep.report.pages.text import to_rich

    _check_outputs(bits, out, csv, html)
    quantizers = parse_quantizers(formats.split(","))
    _check_captured(path)
    matrices, skipped = find_matrices(path)
    rows = _probed(matrices, quantizers)
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


def _check_outputs(bits: float | None, out: Path | None, csv: Path | None, html: Path | None) -> None:
    """Raise UserError for files that probe() cannot write."""
    if out and bits is None:
        raise UserError("--out: there is no recipe without a budget; give --bits, such as --bits 6")
    for option, file in (("--out", out), ("--csv", csv), ("--html", html)):
        if file and not file.parent.is_dir():
            raise UserError(f"{option} {file}: its folder does not exist; give a file in a folder that does")
    if out and out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out}: a recipe's file must end in .yaml or .yml, or recipe=PATH does not take it")


def _check_captured(path: Path) -> None:
    """Raise Damaged if `path` is an ended run, or in one, and its captured operands have changed since."""
    from hqsweep.sweep.store import seal
    from hqsweep.sweep.store.run_dir import RunDir

    whole = path.resolve()
    for folder in (whole, *whole.parents[:2]):
        files = RunDir(folder).sealed() if (folder / seal.FILE).is_file() else None
        for fault in seal.faults(folder, files) if files is not None else ():
            if Path(fault.file).parent.name == seal.CAPTURED:
                raise fault


def _probed(matrices: Sequence[Any], quantizers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows of jobs.probe for all matrices and quantizers. Prints the expected time and the progress on
    stderr."""
    from rich.markup import escape
    from rich.progress import Progress, TimeElapsedColumn

    from hqsweep.jobs.probe.job import expected_seconds, probe
    from hqsweep.sweep.console import SafeConsole, duration

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


def _check_loss_options(others: Mapping[str, Any], csv: Path | None, study: Path | None) -> None:
    """Raise UserError for options that say nothing of a model's loss, and for a study that cannot be written."""
    given = [option for option, value in (others | {"--csv": csv}).items() if value is not None]
    if given:
        raise UserError(f"{given[0]}: is of a probe of tensors, and --data probes the loss of a model; leave one out")
    if study and not study.parent.is_dir():
        raise UserError(f"--study {study}: its folder does not exist; give a file in a folder that does")
    if study and study.suffix not in (".yaml", ".yml"):
        raise UserError(f"--study {study}: a study's file must end in .yaml or .yml, or conf=PATH does not take it")


def _probe_loss(path: Path, data: Path, recipe: str, count: int, study: Path | None, *, as_json: bool) -> None:
    """Measure, print and write the causes of a model's loss."""
    from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

    from hqsweep.jobs.probe.loss import losses_at_once, probe_loss
    from hqsweep.jobs.probe.treatments import converted_shapes, treatments, write_study
    from hqsweep.models.hf import load_model
    from hqsweep.report.pages.probe import causes_tables, loss_sentences
    from hqsweep.sweep.console import SafeConsole
    from hqsweep.train.build import pick_device

    batch = _batch(data, count)
    model = load_model(path).to(pick_device("auto"))
    console = SafeConsole(stderr=True)
    with Progress(
        *Progress.get_default_columns()[:2], TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("loading")

        def progress(what: str, done: int, of: int) -> None:
            bar.update(task, description=what[-40:], completed=done, total=of, refresh=True)

        causes = probe_loss(model, batch, recipe, progress=progress)
        arms = treatments(causes, converted_shapes(model))
        losses = losses_at_once(model, batch, {arm.name: arm.whole(recipe) for arm in arms}, progress=progress)
    if study:
        write_study(study, causes, arms, model=str(path.resolve()), data=str(data.resolve()), losses=losses)
    document = causes.document() | {
        "treatments": [
            {"arm": arm.name, "overrides": dict(arm.overrides), "why": arm.why, "loss": losses[arm.name]}
            for arm in arms
        ]
    }
    tables = causes_tables(causes, arms, losses, SHOWN)
    print_result(as_json, document, *tables, *loss_sentences(causes), *([f"wrote {study}"] if study else []))
    if study:
        say(f"{NEXT}hqsweep run conf={study}", err=as_json)


def _batch(data: Path, count: int) -> Any:
    """int64 [B, T + 1]: about `count` tokens of the val split, in rows of at most 512."""
    from hqsweep.config.train import DataConfig
    from hqsweep.train.data import load

    if not data.exists():
        raise UserError(f"--data: '{data}' does not exist; give shards, which hqsweep data prepare makes")
    context = min(512, count)
    tokens = load(DataConfig(source="shards", path=str(data)))
    inputs, targets = tokens.batch("val", 0, 0, max(1, count // context), context)
    import torch

    return torch.cat([inputs, targets[:, -1:]], dim=1)
