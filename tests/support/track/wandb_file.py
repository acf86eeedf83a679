"""The contents of an offline run's .wandb file, without a server."""

from pathlib import Path
from types import SimpleNamespace

from hqsweep.foreign_logs.trackers import items, records


def load(folder: Path) -> SimpleNamespace:
    """Run, config, history rows, summary, artifacts and exit code of the one .wandb file in `folder`."""
    (path,) = folder.glob("*.wandb")
    contents = SimpleNamespace(run=None, config={}, history=[], summary={}, artifacts=[], exit_code=None)
    for record in records(path.read_bytes()):
        match record.WhichOneof("record_type"):
            case "run":
                contents.run = record.run
                contents.config |= items(record.run.config.update)
            case "history":
                contents.history.append(items(record.history.item))
            case "summary":
                contents.summary |= items(record.summary.update)
            case "artifact":
                contents.artifacts.append(record.artifact)
            case "exit":
                contents.exit_code = record.exit.exit_code
    return contents
