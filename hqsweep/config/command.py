"""The job command: a run of a program of the user's own, and how its logs are judged."""

import re
import shlex
import string
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from hqsweep.config.keys import Job
from hqsweep.config.section import Count, Positive, Section
from hqsweep.errors import UserError, nearest

BUILT_IN = ("recipe", "seed", "arm", "run_dir")
"""The placeholders of every command; the others are keys of args."""
Plain = str | int | float | bool | None


def _number_or_part(value: Any) -> Any:
    """The margin as text: 0.002, or "0.25%"."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class JudgeSection(Section):
    """What is judged of the rows that a program logs.

    metric: null: val_loss, or the only one. lower_is_better: null: what the metric's name says. margin: in the metric's
    unit (0.002), or a part of the baseline's mean ("0.25%"); null: the sweep's. window: values are means over the last
    steps (50), or the last part of a run (0.1); null: the last value. null_arm: an arm that repeats the baseline.
    """

    metric: str | None = None
    lower_is_better: bool | None = None
    margin: Annotated[str | None, BeforeValidator(_number_or_part)] = None
    window: Positive | None = None
    null_arm: str | None = None


class RecipeName(Section):
    """The word for {recipe}, and the name of the arm that it makes."""

    name: Annotated[str, Field(min_length=1)]
    text: str | None = None

    @property
    def word(self) -> str:
        return self.text or self.name


class CommandConfig(Job):
    """Run a program that trains, and take the rows that it logs.

    command: its words as a shell splits them, without a shell; {recipe}, {seed}, {arm}, {run_dir} and keys of args
    stand for the values of the run, and {{ for a brace. null: a loop within the user's own process (hqsweep.track).
    log: the file of JSON lines that the program writes, which may have placeholders; null: what it prints, or what
    hqsweep.track sends. steps: the last step, for the display alone.
    """

    job: Literal["command"]
    recipe: RecipeName = RecipeName(name="baseline")
    command: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    log: str | None = None
    steps: Count | None = None
    judge: JudgeSection = JudgeSection()

    @field_validator("command")
    @classmethod
    def _words(cls, command: str | None) -> str | None:
        if command is not None:
            try:
                words = shlex.split(command)
            except ValueError as error:
                raise UserError(f"command: {command!r} has no words of a shell ({error}); close the quotes") from None
            if not words:
                raise UserError("command: empty; give a program, as in 'python train.py --seed {seed}'")
        return command

    @model_validator(mode="after")
    def _known(self) -> "CommandConfig":
        for key, text in (("command", self.command), ("log", self.log)):
            known = [*BUILT_IN, *self.args]
            if odd := next((name for name in placeholders(text, key) if name not in known), None):
                hint = nearest(odd, known) or f"; known are {', '.join(known)}"
                raise UserError(f"{key}: no value for {{{odd}}}{hint}; args.{odd}=VALUE gives it one")
        if taken := next((name for name in self.args if name in BUILT_IN), None):
            raise UserError(f"args.{taken}: {{{taken}}} has a value of its own; call it otherwise")
        return self

    def words(self, arm: str, run_dir: str) -> list[str]:
        """The words of the command of this run."""
        values = self.values(arm, run_dir)
        return [filled(word, values) for word in shlex.split(self.command or "")]

    def values(self, arm: str, run_dir: str) -> dict[str, Any]:
        """Placeholder -> its value."""
        return self.args | {"recipe": self.recipe.word, "seed": self.seed, "arm": arm, "run_dir": run_dir}


def placeholders(text: str | None, key: str) -> list[str]:
    """The names in braces. Raises UserError, which begins with `key`, for other braces."""
    try:
        parts = [*string.Formatter().parse(text or "")]
    except ValueError as error:
        raise UserError(
            f"{key}: {text!r} has a brace that is no placeholder ({error}); write {{{{ for a brace"
        ) from None
    named = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
    if odd := next((each for each in named if not re.fullmatch(r"\w+", each[0]) or any(each[1:])), None):
        raise UserError(f"{key}: {{{odd[0]}}} is no placeholder; write {{NAME}}, or {{{{ for a brace")
    return [name for name, *_ in named]


def filled(text: str, values: Mapping[str, Any]) -> str:
    """The text with its placeholders replaced; true and false as YAML has them."""
    plain = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
    return text.format_map(plain)
