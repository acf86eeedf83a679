"""benchmarks/quantize.py: the table is complete, every case runs, and a wrong kernel is never timed."""

import argparse
import json

import pytest
import torch
from support.benchmarks.host_clock import HostClock

from benchmarks import cases, quantize, quantize_cpu, rows
from benchmarks.cases import EIGHT_BITS, Case
from hqsweep.formats import parse

ALL = cases.all_cases()


def arguments(tmp_path, **options):
    arguments = {"only": cases.SECTIONS, "out": tmp_path / "rows.jsonl", "commit": "abc", "rows": 256, "cols": 256}
    return argparse.Namespace(**arguments | options)


def find(**fields):
    return [c for c in ALL if all(getattr(c, name) == value for name, value in fields.items())]


def test_every_row_of_the_table_is_there_with_its_goal():
    for text in ("mxfp8", "fp8_block"):
        for row, column in ((text, None), (None, text), (text, text)):
            assert [c.goal for c in find(section="single", rowwise=row, columnwise=column)] == [0.85]
    assert [c.goal for c in find(rowwise="nvfp4", columnwise=None)] == [0.80, 0.85]  # given, found
    assert [c.goal for c in find(section="single", rowwise="nvfp4", columnwise="nvfp4")] == [0.70, 0.85]
    assert [c.goal for c in find(rowwise="fp8_block+2d")] == [0.92]
    assert [c.goal for c in find(rowwise="nvfp4+2d")] == [0.75]
    assert [c.goal for c in find(rowwise=None, columnwise="nvfp4+rht+sr")] == [0.60]
    assert {c.goal for c in find(output="exact")} == {0.85}


@pytest.mark.parametrize(("section", "eight", "four"), [("pairs", 0.85, 0.75), ("dequantized", 0.80, 0.70)])
def test_every_ordered_pair_has_its_goal(section, eight, four):
    goals = {(c.rowwise, c.columnwise): c.goal for c in find(section=section)}
    for row in EIGHT_BITS:
        for column in EIGHT_BITS:
            if section == "dequantized" or row != column:
                assert goals.pop((row, column)) == eight
        assert goals.pop((row, "nvfp4")) == goals.pop(("nvfp4", row)) == four
    assert not goals


def test_names_are_unique_within_a_section():
    names = [(c.section, c.name) for c in ALL]
    assert len(names) == len(set(names))


def test_passes_count_the_search_for_a_global_amax():
    assert Case(section="s", rowwise="nvfp4", has_amax=False).passes == 2
    assert Case(section="s", rowwise="nvfp4").passes == 1
    assert Case(section="s", rowwise="mxfp8", has_amax=False).passes == 1


def test_predicted_bytes_are_those_written():
    for text in ("mxfp8", "nvfp4", "fp8_block+2d", "fp8_current", "nvfp4+row_scaled"):
        format = parse(text)
        case = Case(section="s", rowwise=text)
        real = sum(t.nbytes for t in format.encode(torch.zeros(256, 384)).values())
        assert quantize.output_bytes(format, case, torch.Size((256, 384))) == real


def test_more_work_is_predicted_to_take_longer():
    def work(**fields):
        return cases.instructions(Case(section="s", **fields))

    assert work(rowwise="mxfp8") < work(rowwise="nvfp4") < work(columnwise="nvfp4+rht+sr")
    both = {"rowwise": "mxfp8", "columnwise": "nvfp4"}
    assert work(**both) < work(**both, source="rowwise_dequantized")
    assert cases.issue_seconds(1.0, 4 * 32 * 100, sms=1, clock_hz=1.0) == 100.0


@pytest.mark.parametrize("case", ALL, ids=lambda c: f"{c.section} {c.name}")
def test_every_case_is_exact_on_the_cpu(case):
    x = quantize.sample(256, 256, "cpu")
    actual, wanted = quantize.tensors_of(quantize.call_of(x, case)()), quantize.expected(x, case)
    assert len(actual) == len(wanted)
    for ours, theirs in zip(actual, wanted, strict=True):
        assert quantize.same_bytes(ours.to(theirs.dtype), theirs)


def test_rows_of_all_sections(tmp_path, monkeypatch):
    monkeypatch.setattr(quantize, "host", lambda text: {"us": 1.0, "pass": True})
    monkeypatch.setattr(quantize, "CHECK_SHAPES", ((16, 32),))
    monkeypatch.setattr(quantize, "require_exact", lambda case, device: None)
    writer = rows.Writer("quantize", "cpu", arguments(tmp_path))
    speed = quantize.Speed(quantize.sample(256, 256, "cpu"), HostClock(), sms=132, clock_hz=1e9)
    quantize.run_sections(writer, arguments(tmp_path), speed)
    assert not [row for row in writer.rows if "error" in row]
    assert {row["section"] for row in writer.rows} == set(cases.SECTIONS)
    timed = [row for row in writer.rows if row["section"] in ("single", "pairs", "dequantized", "exact")]
    assert len(timed) == len(ALL)
    assert all(row["reached"] > 0 and row["bytes_floor_us"] > 0 and row["issue_floor_us"] > 0 for row in timed)
    assert all(row["pass"] == (row["reached"] >= row["goal"]) for row in timed if row["goal"])
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(written) == len(writer.rows)
    assert all(row["commit"] == "abc" and row["torch"] == torch.__version__ for row in written)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    case = Case(section="s", rowwise="mxfp8")
    right = quantize.expected
    monkeypatch.setattr(quantize, "expected", lambda x, case: [right(x, case)[0] ^ 1, right(x, case)[1]])
    with pytest.raises(AssertionError, match=r"differ at \(512, 1024\); nothing was timed"):
        quantize.require_exact(case, torch.device("cpu"))


def test_a_failing_case_is_a_row_and_the_next_one_runs(tmp_path):
    def fail():
        raise RuntimeError("no such kernel")

    writer = rows.Writer("quantize", "cpu", arguments(tmp_path))
    writer.attempt({"section": "a", "case": "1"}, fail)
    writer.attempt({"section": "a", "case": "2"}, lambda: {"us": 1.0})
    assert [row.get("error") for row in writer.rows] == ["RuntimeError: no such kernel", None]
    with pytest.raises(SystemExit) as stop:
        rows.finish(writer, ("case", "us"))
    assert stop.value.code == 1


@pytest.mark.slow
def test_cpu_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(quantize_cpu, "SECONDS", 0.01)
    writer = rows.Writer("quantize", "cpu", arguments(tmp_path))
    quantize.measure_cpu(writer, arguments(tmp_path, quick=True, rows=512, cols=256))
    assert not [row for row in writer.rows if "error" in row]
    assert [row["case"].split()[0] for row in writer.rows] == list(quantize_cpu.FORMATS)
    assert all(row["kernel_ns"] > 0 and row["reference_ns"] > 0 and row["copy_ns"] > 0 for row in writer.rows)
    judged = [row for row in writer.rows if "pass" in row]
    assert len(judged) == len(quantize_cpu.GOAL_FORMATS)
    assert all(row["times_reference"] >= 40 for row in judged if row["pass"])
