"""`hqsweep doctor`: a page for people, facts for machines, and pairs of formats as the plans and refusals have them."""

import json

import pytest
from typer.testing import CliRunner

from hqsweep import formats
from hqsweep.cli.doctor import FORMATS, products, reasons
from hqsweep.cli.main import app


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


def by_pair(capability):
    return {(p.a, p.b): p for p in products(capability)}


def test_every_name_is_there():
    assert {formats.words_of(text)[0] for text in FORMATS} == set(formats.NAMES)


def test_a_cpu_multiplies_exactly_whatever_may_meet():
    pairs = by_pair(None)
    assert len(pairs) == len(FORMATS) * (len(FORMATS) + 1) // 2
    assert pairs["mxfp8", "nvfp4"].mode == "exact" and pairs["mxfp8", "nvfp4"].exact.startswith("exact: bf16 operands")
    assert pairs["mxfp8", "mxfp8"].mode == "strict" and "needs a GPU" in pairs["mxfp8", "mxfp8"].native_fault
    assert pairs["bf16", "bf16"].mode == "native" and pairs["nvfp4", "nvfp4+rht"].mode == "none"
    assert pairs["fp8_block+fp32_scale", "fp8_block+fp32_scale"].exact.startswith("exact: fp32 operands")


@pytest.mark.parametrize(
    ("capability", "native"),
    [((8, 0), set()), ((8, 9), {"fp8_current"}), ((9, 0), {"fp8_current", "fp8_block"}), ((12, 0), set()),
     ((10, 0), {"fp8_current", "mxfp8", "nvfp4"})],
)  # fmt: skip
def test_tensor_cores_by_capability(capability, native):
    pairs = by_pair(capability)
    low = ("fp8_current", "fp8_block", "mxfp8", "nvfp4", "mxfp4")
    assert {name for name in low if pairs[name, name].mode == "native"} == native
    assert pairs["mxfp8", "mxfp8"].native_on == ("sm_100",) == pairs["mxfp8", "mxfp8"].untried
    assert pairs["fp8_current+e5m2", "fp8_current+e5m2"].native_on == ()


def test_every_pair_has_one_reason_to_stop():
    rows = products((9, 0))
    assert sum(row["pairs"] for row in reasons(rows)) == sum(p.mode != "native" for p in rows)
    assert any("E5M2 does not meet E5M2" in row["reason"] for row in reasons(rows))
