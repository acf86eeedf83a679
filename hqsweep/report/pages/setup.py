"""The setup of a study: the model, its data and its training, as facts that all runs share, and the command; and the
notes that people gave its sweeps, as prose.
"""

import shlex
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from markdown_it import MarkdownIt
from markupsafe import Markup

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.frames import FORK
from hqsweep.report.pages.text import TextTable, text
from hqsweep.sweep.store import edits
from hqsweep.sweep.store.store import RunStore

MOST = 4
"""The values of one fact that are listed; of more the number."""
MARKS = MarkdownIt("commonmark", {"html": False}).disable("image").enable("table")
"""Markdown without HTML and pictures; links lead to http, https, mailto or a place on the page."""


def setup(comparison: Comparison) -> TextTable:
    """What was trained and how, a fact a row: model, training, forks, data, machine and the command that made it."""
    runs = comparison.frames.runs
    every = pd.concat([runs, comparison.trunks.runs]) if len(comparison.trunks.runs) else runs
    facts = {
        "model": _model(runs),
        "training": _training(every),
        "learning rate": _rate(runs, comparison.design == FORK),
        "forks": _forks(comparison),
        "data": _data(runs),
        "judged": _judged(comparison),
        "machine": _machine(every),
        "command": "\n".join(commands(comparison)),
    }
    return TextTable(header=("setup", "value"), rows=tuple((name, said) for name, said in facts.items() if said))


def commands(comparison: Comparison) -> list[str]:
    """The command of each sweep, as a shell reads it."""
    found = []
    for folder in folders(comparison):
        if (folder / "sweep.json").is_file():
            facts = RunStore(folder.parent).facts(folder.name)
            named = [] if facts["conf"] == folder.name else [f"sweep={folder.name}"]
            stated = [each for each in facts["overrides"] if not each.startswith("sweep=")]
            found.append(shlex.join(["hqsweep", "run", f"conf={facts['conf']}", *named, *stated]))
    return found


def folders(comparison: Comparison) -> list[Path]:
    """The folders of the sweeps, each once."""
    return list(dict.fromkeys(Path(path).parent for path in comparison.frames.runs["path"]))


def prose(comparison: Comparison) -> dict[str, str]:
    """SWEEP, or SWEEP/RUN -> its note in Markdown, where it has one."""
    said = {}
    for folder in folders(comparison):
        for run, note in edits.read(folder).items():
            if note.note:
                said[f"{folder.name}/{run}".rstrip("/")] = note.note
    return said


def marked_up(markdown: str) -> Markup:
    """Markdown as HTML, in which tags are text, pictures are links, and no link runs a script."""
    tokens = MARKS.parse(markdown)
    for token in tokens:
        if token.type.startswith("heading"):
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"  # below the sections of the page
    return Markup(MARKS.renderer.render(tokens, MARKS.options, {}))


def _facts(runs: pd.DataFrame, key: str) -> list[str]:
    """The values of a column, none of them twice; [] where no run has one."""
    return [text(value) for value in runs[key].dropna().unique()] if key in runs else []


def _said(runs: pd.DataFrame, key: str, form: str = "{}") -> str:
    """A fact in a form of words, or "" where it is not known."""
    found = _facts(runs, key)
    if len(found) > MOST:
        return form.format(f"{len(found)} values")
    return form.format(" / ".join(found)) if found else ""


def _counted(runs: pd.DataFrame, key: str, form: str) -> str:
    """A whole number, or its range, in a form of words."""
    values = runs[key].dropna().astype(float) if key in runs else pd.Series(dtype=float)
    if values.empty:
        return ""
    ends = dict.fromkeys((f"{values.min():,.0f}", f"{values.max():,.0f}"))
    return form.format(" to ".join(ends))


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(part for part in parts if part)


def _set(runs: pd.DataFrame, key: str, form: str) -> str:
    """A fact, unless it is off."""
    return "" if _facts(runs, key) in (["0"], ["False"], ["none"], ["null"]) else _said(runs, key, form)


def _model(runs: pd.DataFrame) -> str:
    model = "config.model."
    parts = [
        _said(runs, f"{model}target") or _said(runs, f"{model}_target_") or _said(runs, f"{model}path"),
        _said(runs, f"{model}layers", "{} layers"),
        _said(runs, f"{model}dim", "width {}"),
        _said(runs, f"{model}heads", "{} heads"),
        _set(runs, f"{model}experts", "{} experts"),
        _counted(runs, "manifest.params", "{} parameters"),
    ]
    return _joined(parts)


def _training(runs: pd.DataFrame) -> str:
    train = "config.train."
    batch, context = _facts(runs, f"{train}batch"), _facts(runs, f"{train}context")
    a_step = f"{int(batch[0]) * int(context[0]):,} tokens a step" if len(batch) == len(context) == 1 else ""
    size = _joined([_said(runs, f"{train}batch", "batch {}"), _said(runs, f"{train}context", "context {}")])
    parts = [
        _said(runs, f"{train}optimizer") or _said(runs, f"{train}optimizer.name"),
        _counted(runs, f"{train}steps", "{} steps"),
        f"{size} ({a_step})" if a_step else size,
        _counted(runs, "manifest.tokens", "{} tokens"),
        _said(runs, f"{train}dtype"),
    ]
    return _joined(parts)


def _rate(runs: pd.DataFrame, forked: bool) -> str:
    train = "config.train."
    parts = [_said(runs, f"{train}lr", "{} at its peak")]
    if not forked:
        parts += [_share(runs, f"{train}warmup", "rising"), _share(runs, f"{train}decay", "falling")]
    parts += [_set(runs, f"{train}weight_decay", "weight decay {}"), _set(runs, f"{train}clip", "gradients cut at {}")]
    return _joined(parts)


def _share(runs: pd.DataFrame, key: str, word: str) -> str:
    found = _facts(runs, key)
    return f"{word} over {100 * float(found[0]):g} % of the steps" if len(found) == 1 else ""


def _forks(comparison: Comparison) -> str:
    if comparison.design != FORK:
        return ""
    runs = comparison.frames.runs
    points = " / ".join(f"{point:,}" for point in sorted(runs["point"].unique()))
    trunks = runs["trunk"].nunique()
    parts = [
        f"{trunks} trunk{'s' * (trunks > 1)}, forked at step {points}",
        _said(runs, "config.fork.steps", "{} steps at the constant rate"),
        _said(runs, "config.fork.decay", "{} steps to rate 0"),
    ]
    return _joined(parts)


def _data(runs: pd.DataFrame) -> str:
    parts = [
        _said(runs, "config.data.source") or _said(runs, "config.data._target_"),
        _said(runs, "config.data.path"),
        _said(runs, "manifest.data.split"),
        _counted(runs, "manifest.data.bytes", "{} bytes"),
        _epochs(runs),
    ]
    return _joined(parts)


def _epochs(runs: pd.DataFrame) -> str:
    most = runs["manifest.epochs"].astype(float).max() if "manifest.epochs" in runs else float("nan")
    return f"{most:.2g} epochs" if most == most else ""


def _judged(comparison: Comparison) -> str:
    loss = "training loss over the decay" if comparison.design == FORK else "final validation loss"
    margin = f"{comparison.margin_pct:g} % of the loss"
    if comparison.margin_tokens == comparison.margin_tokens:
        margin = f"{comparison.margin_tokens:g} % of the tokens"
    return f"{loss} against '{comparison.baseline}', margin {margin}"


def _machine(runs: pd.DataFrame) -> str:
    parts = [
        _said(runs, "manifest.device"),
        _said(runs, "manifest.versions.torch", "torch {}"),
        _said(runs, "manifest.versions.hqsweep", "hqsweep {}"),
        _joined(f"commit {commit[:10]}" for commit in _facts(runs, "manifest.commit")),
    ]
    return _joined(parts)
