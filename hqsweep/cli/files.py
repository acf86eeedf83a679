"""Commands for checkpoints and texts in files: `hqsweep checkpoint` and `hqsweep data`."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hqsweep.cli import completion as cli_completion
from hqsweep.cli.output import NEXT, AsJson, OneSentence, RunsDir, Shown, print_result, rows_table, say
from hqsweep.errors import UserError

checkpoint_app = typer.Typer(
    cls=OneSentence, no_args_is_help=True, help="Look at checkpoints of others; export those of runs."
)

TENSOR_COLUMNS = {"tensor": "tensor", "count": "count", "shape": "shape", "dtype": "dtype"}


@checkpoint_app.command("show")
def show_checkpoint(
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
    from hqsweep.checkpoints.inspect import inspect_checkpoint

    checkpoint = inspect_checkpoint(path if path.exists() else _of_run(path, runs_dir))
    document = {"path": str(checkpoint.path), "kind": checkpoint.kind, "step": checkpoint.step}
    document |= {"optimizer": checkpoint.optimizer, "parameters": checkpoint.parameters}
    document |= {"problems": list(checkpoint.problems), "notes": list(checkpoint.notes)}
    tensors = {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in checkpoint.tensors.items()}
    print_result(as_json, document | {"tensors": tensors}, *_checkpoint_page(document, _folded_layers(tensors)))
    checkpoint.check()


def _of_run(word: Path, runs_dir: Path) -> Path:
    """The last checkpoint of the run that a word names; the word itself where it names none."""
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


def _checkpoint_page(document: dict[str, Any], rows: list[dict[str, Any]]) -> list[Shown]:
    step = "" if document["step"] is None else f", step {document['step']}"
    moments = {"none": "no moments", "named": "moments by name", "indexed": "moments by index"}[document["optimizer"]]
    table = rows_table(f"{document['parameters']:,} parameters", rows, TENSOR_COLUMNS)
    lines = [f"note: {note}" for note in document["notes"]]
    lines += [f"problem: {problem}" for problem in document["problems"]]
    return [*([table] if rows else []), f"{document['kind']}{step}, {moments}: {document['path']}", *lines]


def _folded_layers(tensors: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
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


@checkpoint_app.command()
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
    grid: Annotated[
        bool, typer.Option("--grid", help="Write projected weights as the codes and scales of their grids.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write the trained weights of a run for other programs.

    A Hugging Face model becomes a folder that from_pretrained reads; any other model safetensors by its own names. Of a
    folder of torch.distributed.checkpoint the weights become safetensors by the names that they have there.
    """
    from hqsweep.sweep.export import export_folder, export_run
    from hqsweep.sweep.store.store import RunStore

    if (Path(run) / ".metadata").is_file():
        if step is not None:
            raise UserError(f"--step is of runs, and '{run}' is a folder of torch.distributed.checkpoint")
        if grid:
            raise UserError(f"--grid is of runs, and '{run}' is a folder of torch.distributed.checkpoint")
        say(f"wrote the weights in {run} to {export_folder(Path(run), out)}")
        return
    selected = RunStore(runs_dir).one(run)
    written, at = export_run(selected, out, step, grid=grid)
    say(f"wrote the weights of {selected.name} at step {at} to {written}")


data_app = typer.Typer(
    cls=OneSentence, no_args_is_help=True, help="Make shards of tokens for data=shards, and show them."
)


@data_app.command()
def prepare(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A file or a folder: text, JSON lines, Parquet, also .gz and .zst.")
    ],
    tokenizer: Annotated[
        Path, typer.Option(metavar="FILE", help="A tokenizer.json of Hugging Face, its folder, or GGUF.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the shards, for data=shards data.path=DIR.")],
    column: Annotated[str, typer.Option(help="The key of JSON lines or column of Parquet with the text.")] = "text",
    read_as: Annotated[
        Literal["text", "lines", "jsonl", "parquet"] | None,
        typer.Option("--format", help="What files are; default: by their names. lines: each line a document."),
    ] = None,
    val_fraction: Annotated[float, typer.Option(help="Share of documents held out, by a hash of their text.")] = 0.01,
    separator: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="The token after each document; default: the tokenizer's own.")
    ] = None,
    allow_unknown: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of tokens that may stand for text without a token.")
    ] = 0.0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one for each processor.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make shards of all text of SOURCE.

    The same bytes for any number of workers. A call that was killed goes on where it was; one that is done does
    nothing.
    """
    from hqsweep.shards.prepare import prepare

    options: dict[str, Any] = {
        "column": column, "format": read_as, "val_fraction": val_fraction, "separator": separator,
        "allow_unknown": allow_unknown,
    }  # fmt: skip
    try:
        manifest = _with_a_bar(
            lambda progress: prepare(source, tokenizer, out, workers=workers, progress=progress, **options)
        )
    except KeyboardInterrupt:
        raise UserError("stopped; what is done is kept, and the same command goes on") from None
    for line in _text_warnings(manifest.source):
        say(f"warning: {line}", err=True)
    _print_shards(out, as_json, verify=False)
    say(f"{NEXT}hqsweep run conf=convergence data=shards data.path={out}", err=as_json)


@data_app.command("show")
def show_shards(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Shards: of prepare, of Megatron, or of llm.c.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every shard, and compare it with the manifest.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what shards have: tokens, documents, tokenizer, hash, and the first window of a training as text.

    Exit code 3 where a file is not what was written.
    """
    _print_shards(folder, as_json, verify=verify)


def _print_shards(folder: Path, as_json: bool, *, verify: bool) -> None:
    from hqsweep.report.pages.text import TextTable, number, to_rich
    from hqsweep.shards.reader import Shards, facts, sample

    shards = Shards(folder)
    if verify:
        shards.verify()
    document, text = facts(shards), sample(shards)
    rows = []
    for split in ("train", "val"):
        of = document[split]
        cells = [split, *(number(of[key], ",.0f") for key in ("tokens", "documents", "files", "bytes"))]
        rows.append(tuple(cells))
    header = ("split", "tokens", "documents", "shards", "bytes")
    table = TextTable(header=header, rows=tuple(rows), numeric=frozenset(range(1, 5)))
    lines = [f"{document['vocab_size']:,} tokens in the vocabulary, {document['dtype']}; split {document['split']}"]
    if "source" in document:
        source, mark, by = document["source"], document["separator"], document["tokenizer"]
        lines += [
            f"{mark['token']} ({mark['id']}) after each document; {document['bytes_per_token']:.2f} bytes a token;"
            f" unigram entropy of val {document['unigram_entropy_nats']:.3f} nats",
            f"made of {source['files']:,} files ({source['text_bytes'] / 1e6:,.1f} MB of text) by {by['library']},"
            f" tokenizer {by['sha256'][:12]}",
        ]
    lines.append(f"hash {document['hash']}" + (", and every shard is as written" if verify else ""))
    shown = [f"the first window that seed 0 reads:\n{text}"] if text else []
    print_result(as_json, document | {"sample": text}, to_rich(table, f"{document['layout']} shards"), *lines, *shown)


def _text_warnings(source: Any) -> list[str]:
    """The warnings about the text that was read."""
    said = (
        (source.replaced, "documents have bytes that are no UTF-8, which became U+FFFD"),
        (source.unknown, "tokens stand for text that the tokenizer does not cover"),
        (source.empty, "documents are empty, and were left out"),
    )
    return [f"{count:,} {what}" for count, what in said if count]


def _with_a_bar(work: Any) -> Any:
    """The work, with a bar on stderr that counts bytes of the source."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from hqsweep.sweep.console import SafeConsole

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = SafeConsole(stderr=True)
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("tokens", total=None)

        def progress(done: Any) -> None:
            described = f"{done.tokens / 1e6:,.1f} M tokens" + (f", {done.kept} pieces were done" if done.kept else "")
            bar.update(task, completed=done.bytes, total=done.total, description=described)

        return work(progress)
