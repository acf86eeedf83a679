"""Completion as Typer sees it: the two options that install it, and the callbacks that complete an argument."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer


def _then_exit(action: Callable[[str], str]) -> Callable[[typer.Context, str | None], None]:
    def callback(context: typer.Context, shell: str | None) -> None:
        if shell is not None and not context.resilient_parsing:
            typer.echo(action(shell))
            raise typer.Exit

    return callback


def _install(shell: str) -> str:
    from hqsweep.cli.shells import install

    path, loader = install(shell)
    return f"{loader} loads {path}; completion works in new shells"


def _show(shell: str) -> str:
    from hqsweep.cli.shells import script

    return script(shell).rstrip()


Install = Annotated[
    str | None,
    typer.Option("--install-completion", metavar="SHELL", is_eager=True, callback=_then_exit(_install),
                 help="Install completion for bash or zsh."),
]  # fmt: skip
Show = Annotated[
    str | None,
    typer.Option("--show-completion", metavar="SHELL", is_eager=True, callback=_then_exit(_show),
                 help="Print the function for bash or zsh."),
]  # fmt: skip


def register() -> None:
    """Make Typer answer the functions of the shells; it does so by itself only with its own installer."""
    if "_HQSWEEP_COMPLETE" in os.environ:
        from typer.completion import completion_init

        completion_init()


def run_word(context: typer.Context, incomplete: str) -> list[str]:
    from hqsweep.cli.candidates import run_word

    return run_word(incomplete, _path(context, "config_dir"))


def recipe_name(context: typer.Context, incomplete: str) -> list[str]:
    from hqsweep.cli.candidates import recipe_name

    return recipe_name(incomplete, _path(context, "config_dir"))


def run_or_sweep(context: typer.Context, incomplete: str) -> list[str]:
    from hqsweep.cli.candidates import run_or_sweep

    return run_or_sweep(incomplete, _path(context, "runs_dir") or Path("runs"))


def _path(context: typer.Context, name: str) -> Path | None:
    value = context.params.get(name)
    return Path(value) if value else None
