"""`hqsweep data`: text becomes shards of tokens, and what they have."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hqsweep.cli.output import AsJson, OneSentence, print_result, say

app = typer.Typer(cls=OneSentence, no_args_is_help=True, help="Make shards of tokens for data=shards, and show them.")


@app.command()
def prepare(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A file or a folder: text, JSON lines, Parquet, also .gz and .zst.")
    ],
    tokenizer: Annotated[Path, typer.Option(metavar="FILE", help="A tokenizer.json of Hugging Face, or its folder.")],
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
    from hqsweep.errors import UserError
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
    for line in _warnings(manifest.source):
        say(f"warning: {line}", err=True)
    _print(out, as_json, verify=False)
    say(f"next: hqsweep run conf=convergence data=shards data.path={out}", err=as_json)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Shards: of prepare, of Megatron, or of llm.c.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every shard, and compare it with the manifest.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what shards have: tokens, documents, tokenizer, hash, and the first window of a training as text.

    Exit code 3 where a file is not what was written.
    """
    _print(folder, as_json, verify=verify)


def _print(folder: Path, as_json: bool, *, verify: bool) -> None:
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


def _warnings(source: Any) -> list[str]:
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
