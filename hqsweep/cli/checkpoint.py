"""`hqsweep checkpoint`: what a checkpoint holds, and the trained weights of a run for other programs."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from hqsweep.cli import completion as cli_completion
from hqsweep.cli.output import AsJson, OneSentence, RunsDir, Shown, print_result, rows_table, say

app = typer.Typer(cls=OneSentence, no_args_is_help=True, help="Look at checkpoints of others; export those of runs.")

COLUMNS = {"tensor": "tensor", "count": "count", "shape": "shape", "dtype": "dtype"}


@app.command()
def show(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH|RUN",
            help="A Hugging Face folder, .safetensors, .pt, or a folder of torch.distributed.checkpoint; or a run.",
        ),
    ],
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds, by its headers: no tensor is read, and no code of it is run.

    Of a run it is the last one. Exit code 2 for half a checkpoint, and for what is none.
    """
    from hqsweep.checkpoints.foreign.inspect import inspect_checkpoint

    checkpoint = inspect_checkpoint(path if path.exists() else _of_run(path, runs_dir))
    document = {"path": str(checkpoint.path), "kind": checkpoint.kind, "step": checkpoint.step}
    document |= {"optimizer": checkpoint.optimizer, "parameters": checkpoint.parameters}
    document |= {"problems": list(checkpoint.problems), "notes": list(checkpoint.notes)}
    tensors = {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in checkpoint.tensors.items()}
    print_result(as_json, document | {"tensors": tensors}, *_page(document, _folded(tensors)))
    checkpoint.check()


def _of_run(word: Path, runs_dir: Path) -> Path:
    """The last checkpoint of the run that a word names; the word itself where it names none."""
    from hqsweep.errors import UserError
    from hqsweep.sweep.store.store import RunStore
    from hqsweep.train.record import checkpoints

    store = RunStore(runs_dir)
    try:
        store.resolve([str(word)])
    except UserError:
        return word
    run = store.one(str(word))
    states = list(checkpoints(run.checkpoint).values())
    if not states:
        raise UserError(f"'{word}' is the run {run.sweep}/{run.name}, which has no checkpoint")
    return states[-1]


def _page(document: dict[str, Any], rows: list[dict[str, Any]]) -> list[Shown]:
    step = "" if document["step"] is None else f", step {document['step']}"
    moments = {"none": "no moments", "named": "moments by name", "indexed": "moments by index"}[document["optimizer"]]
    table = rows_table(f"{document['parameters']:,} parameters", rows, COLUMNS)
    lines = [f"note: {note}" for note in document["notes"]]
    lines += [f"problem: {problem}" for problem in document["problems"]]
    return [*([table] if rows else []), f"{document['kind']}{step}, {moments}: {document['path']}", *lines]


def _folded(tensors: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a table, one for all tensors whose names differ in numbers alone, and which have the same shape and
    dtype."""
    rows: dict[tuple[str, str, str], int] = {}
    for name, tensor in tensors.items():
        shape = " x ".join(map(str, tensor["shape"])) or "-"
        key = (re.sub(r"(?<=\.)\d+(?=\.|$)", "N", name), shape, tensor["dtype"])
        rows[key] = rows.get(key, 0) + 1
    return [
        {"tensor": name, "count": count, "shape": shape, "dtype": dtype} for (name, shape, dtype), count in rows.items()
    ]


@app.command()
def export(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's name, its beginning, or its folder; or a folder of torch.distributed.checkpoint.",
            autocompletion=cli_completion.run_or_sweep,
        ),
    ],
    out: Annotated[Path, typer.Argument(help="A new folder, or NAME.safetensors.")],
    step: Annotated[int | None, typer.Option(min=1, help="The step; by default the last that is there.")] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write the trained weights of a run for other programs.

    A Hugging Face model becomes a folder that from_pretrained reads; any other model safetensors by its own names. Of a
    folder of torch.distributed.checkpoint the weights become safetensors by the names that they have there.
    """
    from hqsweep.errors import UserError
    from hqsweep.sweep.export import export_folder, export_run
    from hqsweep.sweep.store.store import RunStore

    if (Path(run) / ".metadata").is_file():
        if step is not None:
            raise UserError(f"--step is of runs, and '{run}' is a folder of torch.distributed.checkpoint")
        say(f"wrote the weights in {run} to {export_folder(Path(run), out)}")
        return
    selected = RunStore(runs_dir).one(run)
    written, at = export_run(selected, out, step)
    say(f"wrote the weights of {selected.name} at step {at} to {written}")
