"""The schemas of --json: each command has one, each is a schema, and it refuses other documents.

conftest.py checks the output of every command that the tests in this folder run.
"""

import json

import jsonschema
import pytest
import typer
from typer.testing import CliRunner

from hqsweep.cli.answers import ANSWERS, schema
from hqsweep.cli.main import app


def commands(prefix: str, command: object) -> dict[str, object]:
    inner = getattr(command, "commands", {})
    if not inner:
        return {prefix: command}
    return {
        name: each for word, part in inner.items() for name, each in commands(f"{prefix} {word}".strip(), part).items()
    }


def test_every_command_with_json_has_a_schema() -> None:
    of_json = {
        name for name, command in commands("", typer.main.get_command(app)).items()
        if any("--json" in parameter.opts for parameter in command.params)
    }  # fmt: skip
    assert of_json == set(ANSWERS)


@pytest.mark.parametrize("command", ANSWERS)
def test_a_schema_is_one_and_refuses_another_document(command: str) -> None:
    document = schema(command)
    jsonschema.Draft202012Validator.check_schema(document)
    assert document["title"] == f"hqsweep {command} --json"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(3, document)


@pytest.mark.parametrize("change", [{"loss": "low"}, {"more": 1}, {"run": None}])
def test_a_row_of_status_with_a_fault_is_refused(change: dict) -> None:
    row = {"run": "a", "state": "finished", "step": "2/2", "loss": 1.5, "tokens_per_s": None, "seconds": 1.0,
           "job": None, "reason": None}  # fmt: skip
    jsonschema.validate([row], schema("status"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([row | change], schema("status"))


def test_the_command_prints_it_and_lists_the_commands() -> None:
    run = CliRunner()
    assert json.loads(run.invoke(app, ["schema", "baseline", "update"]).stdout) == schema("baseline update")
    assert json.loads(run.invoke(app, ["schema", "--json"]).stdout) == list(ANSWERS)
    wrong = run.invoke(app, ["schema", "stats"])
    assert wrong.exit_code == 2 and "no command 'stats' with --json (did you mean 'status'?)" in wrong.stderr
