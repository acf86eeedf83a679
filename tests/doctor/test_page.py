"""`hqsweep doctor`: a page for people, facts for machines, and exit code 0."""

import json

from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.doctor.products import FORMATS


def test_the_page_names_every_part_and_format():
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "140"})
    assert shown.exit_code == 0
    for part in ("kernel digest", "slurm", "chromium", "why not", "sm_90", "their scaling modes differ", *FORMATS):
        assert part in shown.stdout


def test_the_facts_hold_every_pair():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0 and set(document) == {"machine", "products", "reasons"}
    assert document["machine"]["torch"]["found"] and len(document["products"]) == len(FORMATS) * (len(FORMATS) + 1) // 2
