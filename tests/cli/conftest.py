"""Every JSON that a test of a command makes is checked by the schema of that command."""

from functools import cache
from typing import Any

import jsonschema
import pytest
from typer._click.globals import get_current_context

from hqsweep.cli import answers, output

validator = cache(lambda command: jsonschema.Draft202012Validator(answers.schema(command)))


@pytest.fixture(autouse=True)
def _json_has_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = output.as_plain

    def checked(document: Any) -> Any:
        result, words = plain(document), get_current_context().command_path.split()[1:]
        validator(" ".join(words)).validate(result)
        return result

    monkeypatch.setattr(output, "as_plain", checked)
