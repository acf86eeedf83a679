"""`hqsweep doctor`: a page for people, and facts for machines."""

import json

import pytest
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.gemm.pairs import FORMATS


def test_the_page_names_every_part_and_format():
    shown = CliRunner().invoke(app, ["doctor", "--all"], env={"COLUMNS": "140"})
    assert shown.exit_code == 0
    for part in ("kernel digest", "slurm", "chromium", "why not", "sm_90", "their scaling modes differ", *FORMATS):
        assert part in shown.stdout


def test_the_facts_hold_every_pair():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0 and set(document) == {"card", "machine", "products", "reasons"}
    assert document["machine"]["torch"]["found"] and len(document["products"]) == len(FORMATS) * (len(FORMATS) + 1) // 2


@pytest.mark.parametrize("words", [[], ["--as", "B200"], ["--as", "cpu"], ["--as", "nvidia h100"]])
def test_the_short_page_fits_half_a_terminal(words):
    shown = CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "80"})
    lines = shown.stdout.splitlines()
    assert shown.exit_code == 0 and len(lines) <= 12 and max(map(len, lines)) <= 80, shown.stdout
    assert "--all" in lines[-1] and ("as on" in lines[0]) == bool(words)


def test_another_card_is_answered_for_and_an_unknown_one_is_a_sentence():
    document = json.loads(CliRunner().invoke(app, ["doctor", "--as", "b200", "--json"]).stdout)
    modes = {row["a"]: row["mode"] for row in document["products"] if row["a"] == row["b"]}
    assert (
        document["card"] == "B200" and modes["nvfp4"] == modes["mxfp8"] == "native" and modes["fp8_block"] == "strict"
    )
    page = CliRunner().invoke(app, ["doctor", "--as", "B200"]).stdout
    assert "as on B200 (sm_100), which need not be here" in page
    assert "from documents, not yet run there: fp8_current" in page
    assert "native       bf16, fp16, fp32\n" in CliRunner().invoke(app, ["doctor", "--as", "A100"]).stdout
    wrong = CliRunner().invoke(app, ["doctor", "--as", "B20"])
    assert wrong.exit_code == 2 and "--as: no card 'B20' (did you mean 'B200'?); there are A100" in wrong.output
