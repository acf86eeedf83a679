"""Tokens from text: `hqsweep data prepare` beside the tokenizer library alone, on the same number of processes.

    python -m benchmarks.prepare [--megabytes 64] [--workers 2] [--repeats 3] [--tokenizer tokenizer.json]

prepare  MB of text a second that become shards, from the call to its end: starting the workers, reading, tokenizing,
         writing, hashing; of each kind of file. `alone` is encode_batch_fast of the same documents, which are in memory
         before the clock starts, with the same number of processes, each on one thread; measured before and after
         each. share: of that rate. cpu_share: of its CPU seconds in those of prepare, which other work on the machine
         does not move.

The text are the sources of the standard library, repeated where they are less than asked, as JSON lines of one file
each; the tokenizer is a byte-level BPE of 32,000 tokens trained on a tenth of them.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks import rows
from hqsweep.shards.encode import ONE_THREAD
from hqsweep.shards.prepare import prepare
from hqsweep.train import corpus

SECTIONS = ("prepare",)
KINDS = ("jsonl", "jsonl.zst", "jsonl.gz", "parquet", "text")
COLUMNS = ("section", "case", "workers", "megabytes", "tokens", "mb_s", "alone_mb_s", "share", "cpu_share")
ALONE = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
lines = open(sys.argv[2]).read().splitlines()
first, step = int(sys.argv[3]), int(sys.argv[4])
texts = [json.loads(line)["text"] for line in lines[first::step]]
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
start, cpu = time.perf_counter(), time.process_time()
for at in range(0, len(texts), 64):
    tokenizer.encode_batch_fast(texts[at : at + 64], add_special_tokens=False)
print(json.dumps([time.perf_counter() - start, time.process_time() - cpu]))
"""


def texts(size: int) -> list[str]:
    """The sources of the standard library, `size` bytes of them."""
    data = corpus.stdlib(0.1, None).train.tobytes().decode(errors="replace")
    pieces = [data[at : at + 8192] for at in range(0, len(data), 8192)]
    repeated = [text for _ in range(-(-size // len(data))) for text in pieces]
    return repeated[: size // 8192]


def train_tokenizer(path: Path, documents: Sequence[str], vocab: int = 32_000) -> Path:
    """Train a byte-level BPE on a tenth of the texts; returns its file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents[::10], trainer)
    tokenizer.save(str(path))
    return path


def write(folder: Path, kind: str, documents: Sequence[str]) -> Path:
    """Write the texts as a source of a kind; text is one file for each, in folders of a hundred."""
    path = folder / f"source.{kind}"
    if kind == "text":
        for i, text in enumerate(documents):
            (path / f"{i // 100}").mkdir(parents=True, exist_ok=True)
            (path / f"{i // 100}/{i}.txt").write_text(text)
    elif kind == "parquet":
        parquet.write_table(pyarrow.table({"text": documents}), path, row_group_size=128)
    else:
        data = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
        codec = {"jsonl.zst": "zstd", "jsonl.gz": "gzip"}.get(kind)
        opened = pyarrow.CompressedOutputStream(str(path), codec) if codec else path.open("wb")
        with opened as stream:
            stream.write(data)
    return path


def alone(tokenizer: Path, lines: Path, workers: int) -> tuple[float, float]:
    """(seconds until the last process is done, CPU seconds of all) of the library on documents in memory."""
    command = [sys.executable, "-c", ALONE, str(tokenizer), str(lines)]
    started = [
        subprocess.Popen(
            [*command, str(i), str(workers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ONE_THREAD
        )
        for i in range(workers)
    ]
    for process in started:
        process.stdout.readline()
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    taken = [json.loads(process.communicate()[0]) for process in started]
    return max(wall for wall, _ in taken), sum(cpu for _, cpu in taken)


def prepared(source: Path, tokenizer: Path, workers: int) -> tuple[float, float, int]:
    """(seconds, CPU seconds of this process and its workers, tokens) of prepare."""
    with tempfile.TemporaryDirectory() as out:
        start, cpu = time.perf_counter(), cpu_seconds()
        manifest = prepare(source, tokenizer, Path(out) / "shards", val_fraction=0.05, workers=workers)
        return time.perf_counter() - start, cpu_seconds() - cpu, manifest.tokens("train") + manifest.tokens("val")


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(folder: Path, kind: str, documents: Sequence[str], args: argparse.Namespace) -> rows.Row:
    source, lines = write(folder, kind, documents), folder / "source.jsonl"
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    walls, cpus, ours, tokens = [], [], [], 0
    for repeat in range(args.repeats + 1):
        wall, cpu = alone(args.tokenizer, lines, args.workers)
        walls.append(wall)
        cpus.append(cpu)
        if repeat < args.repeats:
            wall, cpu, tokens = prepared(source, args.tokenizer, args.workers)
            ours.append((wall, cpu))
    wall, cpu = (statistics.median(times) for times in zip(*ours, strict=True))
    reference = statistics.median(walls)
    return {
        "workers": args.workers, "megabytes": megabytes, "tokens": tokens, "mb_s": megabytes / wall,
        "alone_mb_s": megabytes / reference, "share": reference / wall, "cpu_share": statistics.median(cpus) / cpu,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--tokenizer", type=Path)
    rows.add_arguments(parser, SECTIONS)
    args = parser.parse_args(arguments)
    writer = rows.Writer("prepare", "cpu", args)
    with tempfile.TemporaryDirectory() as name:
        folder, documents = Path(name), texts(int(args.megabytes * 1e6))
        args.tokenizer = args.tokenizer or train_tokenizer(folder / "tokenizer.json", documents)
        write(folder, "jsonl", documents)
        for kind in args.kinds:
            writer.attempt(
                {"section": "prepare", "case": kind}, lambda kind=kind: measure(folder, kind, documents, args)
            )
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
