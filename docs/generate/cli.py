"""docs/reference/cli.md: every command with its arguments and options."""

import inspect
from typing import Any

import typer

from docs.generate.source import table
from hqsweep.cli import main as cli


def page() -> str:
    exit_codes = inspect.getdoc(cli).partition("\n\n")[2]
    parts = ["# Command line\n", exit_codes, ""]
    for path, command in _commands("hqsweep", typer.main.get_command(cli.app)):
        parts += [f"## {path}\n", inspect.cleandoc(command.help or ""), "", _parameters(command)]
    return "\n".join(parts)


def _commands(path: str, command: Any) -> list[tuple[str, Any]]:
    """(words, command), groups before what is in them."""
    inner = getattr(command, "commands", {})
    return [(path, command), *(found for name, each in inner.items() for found in _commands(f"{path} {name}", each))]


def _parameters(command: Any) -> str:
    context = typer.Context(command)
    records = [parameter.get_help_record(context) for parameter in command.params]
    return table(("argument or option", "what it is"), [record for record in records if record])
