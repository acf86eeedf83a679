"""parity.ranks: what ranks compute together is one process to the byte, and a rank that has another byte is named."""

from dataclasses import replace

import pytest
import torch
from support.parallel.parity_ranks import DAMAGES, checked

from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.jobs.parity import job as parity
from hqsweep.jobs.parity import rank_cases, rank_layers, ranks
from hqsweep.jobs.sink import ListSink
from hqsweep.parallel.wire.spawn import stream_ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo"),
    pytest.mark.slow,
]
SUBJECTS = {
    2: ("nvfp4+rht+sr", "fp8_block|nvfp4@rowwise_dequantized", "mxfp8|fp8_current", "fp8_delayed"),
    4: ("nvfp4+rht+sr",),
}
"""Number of ranks -> whose results are computed."""


def config(*numbers):
    formats = ["mxfp8", "nvfp4+rht+sr"]
    section = {"formats": formats, "distributions": ["heavy"], "shapes": [[32, 48]], "checks": ["export"]}
    return parse({"job": "parity", "sweep": "parity", "parity": section | {"device": "cpu", "ranks": list(numbers)}})


def sections_of(number):
    every = ranks.subjects(config())
    return {subject: every[subject] for subject in SUBJECTS[number]}


@pytest.fixture(scope="module")
def spawned():
    """Number of ranks -> what they yield: the results for each subject, then those of damaged columns."""
    damaged = {name: ranks.subjects(config())[damage.subject] for name, damage in DAMAGES.items()}
    return {n: list(stream_ranks(n, checked, n, sections_of(n), damaged if n == 2 else {})) for n in SUBJECTS}


@pytest.fixture(scope="module")
def every(spawned):
    """Number of ranks -> subject -> what the ranks have of each column."""
    return {n: dict(zip(SUBJECTS[n], spawned[n][:-1], strict=True)) for n in SUBJECTS}


@pytest.fixture
def run(every, monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, "run_ranks", lambda number, sections, *_: (every[number][each] for each in sections))

    def rows(number, *subjects):
        chosen = {subject: section for subject, section in sections_of(number).items() if subject in subjects}
        monkeypatch.setattr(ranks, "subjects", lambda _: chosen)
        sink = ListSink()
        sink.progress = lambda *_, part=None: parts.append(part)
        parity.run(config(number), sink, tmp_path)
        return [row for row in sink.tables["parity"] if row["check"] != "export"]

    parts = []
    rows.parts = parts
    return rows


def failed(rows):
    return {(row["check"], row["case"], row["subject"]): row["first_index"] for row in rows if row["status"] != "PASS"}


def case_of(number, column):
    return f"{number} ranks, {column.case}" if column.case else f"{number} ranks"


@pytest.mark.feature("H3", "H4")
@pytest.mark.parametrize("number", SUBJECTS)
def test_ranks_are_one_process_to_the_byte(number, run):
    rows = run(number, *SUBJECTS[number])
    assert failed(rows) == {} and all(row["total"] > 0 for row in rows)
    columns = [(column.name, case_of(number, column)) for column in ranks.COLUMNS]
    names = {*columns, *((name, f"{case}, operands") for name, case in columns)}
    assert {name for name, _ in names} == {"ddp", "fsdp2", "tp", "ep", "pp"}
    sums = {(rank_cases.NAME, f"{number} ranks, {case}") for case in ("y by row", "dx by column")}
    for subject in SUBJECTS[number]:
        assert {(row["check"], row["case"]) for row in rows if row["subject"] == subject} == names | sums


@pytest.mark.gpu2
@pytest.mark.parametrize("number", SUBJECTS)
def test_ranks_on_gpus_are_one_process_to_the_byte(number, monkeypatch, deterministic):
    chosen = sections_of(number)
    monkeypatch.setattr(ranks, "subjects", lambda _: chosen)
    rows = list(ranks.ranks_check(config(number), torch.device("cuda")))
    assert failed(rows) == {} and {column.name for column in ranks.COLUMNS} < {row["check"] for row in rows}


def test_a_job_without_ranks_starts_none(monkeypatch):
    monkeypatch.setattr(ranks, "run_ranks", None)
    assert list(ranks.ranks_check(config(), torch.device("cpu"))) == [] and "ranks" not in parity.checks_of(config())


def test_progress_is_that_of_the_columns(run):
    run(2, "fp8_delayed")
    done = [part for part in run.parts if part is not None]
    share = parity.shares(config(2))["ranks"]
    assert done == sorted(done) and done[-1] == 1.0
    columns = 2 * len(ranks.COLUMNS)
    counted = {round((part - 1 + share) / share * columns, 3) for part in done}
    assert counted >= set(range(1, columns + 1))


DAMAGED = [
    ("fsdp2", "held weights", "y of step 2"),
    ("fsdp2", "held weights", "weight.grad of step 1"),
    ("fsdp2", "held weights", "bias after step 2"),
    ("fsdp2", "held weights", "rowwise_q after step 1"),
    ("ddp", "plain weights", "weight after step 2"),
    ("tp", "by row, tokens split", "y of step 1"),
    ("ep", "", "d fc2.weight of step 2"),
    ("pp", "two stages a rank", "loss of step 2"),
    ("ddp", "plain weights", "operand of parity: grad_output columnwise s, microbatch 1, step 2"),
    ("fsdp2", "gathered in bfloat16", "operand of parity: weight columnwise q, microbatch 1, step 2"),
    ("pp", "one stage a rank", "operand of layers.1.mlp.fc2: input columnwise q, microbatch 0, step 2"),
]


@pytest.mark.feature("H3")
@pytest.mark.parametrize(("check", "case", "name"), DAMAGED)
def test_a_rank_with_another_byte_is_named(check, case, name, every, run):
    subject = "mxfp8|fp8_current"
    [index] = [i for i, column in enumerate(ranks.COLUMNS) if (column.name, column.case) == (check, case)]
    tensor = every[2][subject][1][index][name].view(-1).view(torch.uint8)
    tensor[-1] ^= 1
    try:
        [(where, first)] = failed(run(2, subject)).items()
        ending = ", operands" if name.startswith("operand") else ""
        assert where == (check, case_of(2, ranks.COLUMNS[index]) + ending, subject)
        assert first.startswith(f"{name} on rank 1 [")
    finally:
        tensor[-1] ^= 1


@pytest.mark.feature("H3")
@pytest.mark.parametrize("name", DAMAGES)
def test_what_goes_wrong_on_a_rank_is_named_by_the_operand_it_reaches(name, spawned):
    damage, results = DAMAGES[name], [own[name] for own in spawned[2][-1]]
    problem = rank_cases.Problem(ranks.subjects(config())[damage.subject], 0, 2)
    expected = damage.of_column.expected(problem)
    _, operands = ranks.compared(("check", "subject", "case"), expected, results)
    assert operands["status"] == "FAIL" and operands["case"] == "case, operands"
    assert operands["first_index"].startswith(f"operand of {damage.named}")
    assert damage.everywhere or " on rank 1 [" in operands["first_index"]


def test_a_result_that_one_side_lacks_is_a_failure():
    one = [{"y": torch.zeros(2), "operand of a": torch.zeros(2)}]
    rows = list(ranks.compared(("tp", "mxfp8", "2 ranks"), one, [{"y": torch.zeros(2)}]))
    assert [(row["status"], row["total"], row["note"]) for row in rows] == [
        ("PASS", 2, None),
        ("FAIL", 0, "one side alone has operand of a on rank 0"),
    ]


@pytest.mark.feature("H3")
@pytest.mark.parametrize("subject", ["mxfp8", "nvfp4"])
def test_the_order_of_sums_explains_what_split_sums_differ_by(subject, monkeypatch):
    """Sums of a quarter of the allowed size are not explained, nor a part that is missing."""
    sections = ranks.subjects(config())
    sections["nvfp4"] = sections["nvfp4|nvfp4"]
    problem = rank_cases.Problem(sections[subject], 0, 2)

    def rows():
        return {
            row["case"]: row for row in rank_cases.order_of_sums(subject, problem, rank_layers.shared_sums(problem))
        }

    slices = {"mxfp8": {"2 ranks, wgrad of slices"}, "nvfp4": set()}[subject]
    assert rows().keys() == slices | {"2 ranks, y by row", "2 ranks, dx by column"}
    assert {row["status"] for row in rows().values()} == {"PASS"}
    with monkeypatch.context() as patch:
        patch.setattr(rank_cases, "ROUNDING", 0.0)
        patch.setattr(rank_cases, "TRAVEL", rank_cases.TRAVEL / 4)
        assert {row["status"] for row in rows().values()} == {"FAIL"}
    monkeypatch.setattr(rank_cases, "in_order", lambda parts: parts[0].float())
    lost = rows()
    assert {lost[case]["status"] for case in lost if case not in slices} == {"FAIL"}


def test_a_rank_that_fails_is_a_row(monkeypatch):
    def run_ranks(number, sections, seed, device_type):
        yield [["refused"] * len(ranks.COLUMNS)] * number
        raise torch.multiprocessing.ProcessRaisedException("Traceback\nValueError: no such weight", 1, 7)

    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    *rows, last = ranks.ranks_check(config(2), torch.device("cpu"))
    assert [row["note"] for row in rows[: len(ranks.COLUMNS)]] == ["refused"] * len(ranks.COLUMNS)
    assert (last["status"], last["note"]) == ("FAIL", "rank 1 ended with ValueError: no such weight")
    assert last["subject"] == "nvfp4+rht+sr"


def test_what_ranks_have_is_compared_with_one_thread(monkeypatch):
    """Each rank has one; of "fp8_block+fp32_scale" two threads gave gradients of experts other last bits."""
    threads, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        noting = {"expected": lambda *_: threads.append(torch.get_num_threads()) or []}
        monkeypatch.setattr(ranks, "COLUMNS", tuple(replace(column, **noting) for column in ranks.COLUMNS))
        monkeypatch.setattr(ranks, "order_of_sums", lambda *_: ())
        monkeypatch.setattr(ranks, "shared_sums", lambda *_: None)
        problem = rank_cases.Problem(ranks.everywhere(ranks.parse("mxfp8")), 0, 2, torch.device("cpu"))
        assert len(list(ranks._rows("mxfp8", problem, []))) == 2 * len(ranks.COLUMNS)
        assert set(threads) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_one_number_of_ranks_needs_no_list():
    job = config(2).model_dump()
    alone = parse(job | {"parity": job["parity"] | {"ranks": 2}})
    assert alone == config(2) and alone.parity.ranks == [2]


def test_other_numbers_of_ranks_are_refused():
    with pytest.raises(UserError, match=r"parity.ranks"):
        config(3)
