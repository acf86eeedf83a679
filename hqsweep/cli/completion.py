"""Completion: functions for bash and zsh that ask hqsweep, their installation, and the callbacks by which it answers.

Both ask by Typer's protocol of one word a line, which it made for fish: _HQSWEEP_COMPLETE=complete_fish with the line
up to the cursor. Typer's own function for bash does not serve, because bash ends words at the "=" and ":" of
COMP_WORDBREAKS: of recipe=nv it passes "nv" and would replace "nv" by the whole "recipe=nvfp4". Here the functions take
the last word from the line, and drop from the answers the part that bash cuts off before the cursor.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from hqsweep.errors import UserError

_ASK = "_HQSWEEP_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args"

BASH = f"""\
_hqsweep_completion() {{
    local line=${{COMP_LINE:0:COMP_POINT}} current=${{COMP_WORDS[COMP_CWORD]}} word cut answer
    word=${{line##*[[:space:]]}}
    word=${{word#[\\'\\"]}}
    case $current in
        =|:) cut=$word ;;
        *) current=${{current#[\\'\\"]}}; cut=${{word%"$current"}} ;;
    esac
    COMPREPLY=()
    while IFS=$'\\t' read -r answer _; do
        [[ -n $answer ]] && COMPREPLY+=("${{answer#"$cut"}}")
    done < <({_ASK} _TYPER_COMPLETE_ARGS="$line" "${{COMP_WORDS[0]}}" 2>/dev/null)
    if [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace; fi 2>/dev/null
}}
complete -o default -F _hqsweep_completion hqsweep
"""

ZSH = f"""\
#compdef hqsweep
_hqsweep_completion() {{
    local answer
    local -a going_on whole
    while IFS=$'\\t' read -r answer _; do
        if [[ $answer == *= ]]; then going_on+=("$answer"); elif [[ -n $answer ]]; then whole+=("$answer"); fi
    done < <({_ASK} _TYPER_COMPLETE_ARGS="${{(j: :)words[1,CURRENT]}}" ${{words[1]}} 2>/dev/null)
    if (( ${{#going_on}} + ${{#whole}} == 0 )); then _files; return; fi
    (( ${{#going_on}} )) && compadd -S '' -a going_on
    (( ${{#whole}} )) && compadd -a whole
}}
if [[ $funcstack[1] == _hqsweep ]]; then _hqsweep_completion "$@"; else compdef _hqsweep_completion hqsweep; fi
"""

SCRIPTS = {"bash": (BASH, ".bashrc"), "zsh": (ZSH, ".zshrc")}
"""Shell -> its function, and the file in the home folder that loads it."""


def script(shell: str) -> str:
    """The function of a shell. UserError for a shell without one."""
    return SCRIPTS[_known(shell)][0]


def install(shell: str) -> tuple[Path, Path]:
    """Write the function beside other data of the user and load it at the shell's start; (file, file that loads it).

    Repeating it changes nothing. zsh needs compinit, which is started unless the file starts it already.
    """
    shell = _known(shell)
    text, loader_name = SCRIPTS[shell]
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    path, loader = data / "hqsweep" / f"completion.{shell}", Path.home() / loader_name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    present = loader.read_text() if loader.exists() else ""
    lines = [f"source '{path}'"]
    if shell == "zsh" and "compinit" not in present:
        lines.insert(0, "autoload -Uz compinit && compinit")
    if lines[-1] not in present.splitlines():
        loader.write_text(present + ("\n" if present and not present.endswith("\n") else "") + "\n".join(lines) + "\n")
    return path, loader


def _known(shell: str) -> str:
    if shell not in SCRIPTS:
        raise UserError(f"completion: no function for the shell '{shell}'; there is one for {' and '.join(SCRIPTS)}")
    return shell


def _then_exit(action: Callable[[str], str]) -> Callable[[typer.Context, str | None], None]:
    def callback(context: typer.Context, shell: str | None) -> None:
        if shell is not None and not context.resilient_parsing:
            typer.echo(action(shell))
            raise typer.Exit

    return callback


def _install(shell: str) -> str:
    path, loader = install(shell)
    return f"{loader} loads {path}; completion works in new shells"


def _show(shell: str) -> str:
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
