"""hqsweep.run: what `hqsweep run` does, from Python."""

import re
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hqsweep.api.sweep import Sweep
from hqsweep.errors import UserError, visible
from hqsweep.sweep.engine.until import Until
from hqsweep.sweep.grid.run_words import read, with_seeds

NO_IMPORT = "which no_import=True refuses; give one that is none, or leave no_import out"


def run(
    conf: str,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    config_dir: str | Path | None = None,
    force: bool = False,
    no_import: bool = False,
    quiet: bool = False,
    until: str | None = None,
) -> Sweep:
    """Run the unfinished runs of a sweep's grid, and return the sweep. Call it from the main thread.

    conf        a packaged sweep, one in ./conf or config_dir, or the path of a YAML file
    overrides   KEY=VALUE and KEY=V1,V2 as the command line takes them, without a shell's quotes
    out         folder of the sweeps (runs_dir); None: what the config says, which is ./runs
    config_dir  folder of the user's configs
    force       repeat finished runs
    no_import   refuse a Python factory, instead of importing it
    quiet       print nothing; else progress and warnings go to stderr
    until       start runs for this long alone ("90s", "20m", "2h"), and none that would not be finished by then

    A run that fails raises nothing: its state and reason are in Sweep.runs. The same call resumes a sweep that was
    interrupted.

    Raises:
        UserError: whatever is wrong in any point of the grid, before anything starts; what `hqsweep run` refuses.
    """
    words, limit = _words(conf, overrides, out), None if until is None else Until(until, "until")
    folder = None if config_dir is None else Path(config_dir)
    if folder is not None and not folder.is_dir():
        raise UserError(f"config_dir: {folder} is no folder; give the folder of your configs")
    if threading.current_thread() is not threading.main_thread():
        raise UserError("run: it stops its workers at a signal, which Python gives to the main thread; call it there")
    say = _silent if quiet else _say
    request = read(words, config_dir=folder)  # a mistyped word is refused before torch is imported
    from hqsweep.api.finish import after_failures, finish, warnings_of
    from hqsweep.recipe.factories import Importer
    from hqsweep.sweep.console import PlainDisplay, SafeConsole, open_display
    from hqsweep.sweep.engine import launch

    importer = Importer(say, allowed=() if no_import else None, refusal=NO_IMPORT)
    plan = launch.plan_of(request, importer)
    planned = partial(launch.plan, config_dir=folder, importer=importer)
    options = {"say": say, "look": say, "force": force, "until": limit}
    console = SafeConsole(stderr=True, quiet=quiet, force_jupyter=False)
    display = PlainDisplay(console) if quiet else open_display(console)
    try:
        runs = finish(plan, lambda seeds: planned(with_seeds(words, seeds)), display, **options).runs
    except SystemExit as stopped:
        if stopped.code == 128 + signal.SIGINT:  # in Python, ^C and a notebook's button are this exception
            raise KeyboardInterrupt from None
        raise
    results = [launch.result(run_dir) for run_dir in runs]
    for line in [*warnings_of(results), *filter(None, [after_failures(results)])]:
        say(line)
    return Sweep(*(run_dir.path for run_dir in runs))


def _words(conf: str, overrides: Sequence[str], out: str | Path | None) -> list[str]:
    """The words of `hqsweep run` with the same meaning."""
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        raise UserError(f"overrides: got {overrides!r}; give a list of texts, such as ['train.steps=100', 'seed=0,1']")
    words = [f"conf={conf}", *overrides]
    if out is not None:
        words.append(f"runs_dir={quoted(str(out))}")
    return words


def quoted(text: str) -> str:
    """The text as a value of an override: in quotes, with backslashes doubled where Hydra would read them as
    escapes."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text) + "'"


def _say(line: str) -> None:
    print(visible(line, keep="\n"), file=sys.stderr)


def _silent(line: str) -> None:
    """Print nothing."""
