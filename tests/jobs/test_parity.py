"""The parity job: everything passes here, and a single wrong byte is found and named."""

import functools

import pytest
import torch
from cases import BASES, HIGH

from hqsweep.config.job import parse
from hqsweep.formats import parse as format_of
from hqsweep.gemm import grouped
from hqsweep.jobs.parity import grouped as parity_grouped
from hqsweep.jobs.parity import job as parity
from hqsweep.jobs.parity import modules as parity_causality
from hqsweep.jobs.parity import training as parity_training
from hqsweep.jobs.parity.compare_bytes import row
from hqsweep.jobs.sink import ListSink
from hqsweep.nn import LayerNormMoE
from hqsweep.nn.core import call
from hqsweep.nn.core import call as call_module
from hqsweep.ops.quantize import operators
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer
from hqsweep.recipe import LinearQuantizers, parse_recipe
from hqsweep.sweep.grid.compose import load_recipe

pytestmark = pytest.mark.slow

FORMATS = [*BASES, "nvfp4+rht+sr", "nvfp4+row_scaled"]


FEW = ["bf16", "fp8_current", "mxfp8", "nvfp4"]


def config(*checks, formats=FORMATS):
    section = {
        "formats": formats,
        "distributions": ["heavy", "nonfinite"],
        "shapes": [[32, 48]],
        "checks": list(checks),
        "device": "cpu",
    }
    return parse({"job": "parity", "sweep": "parity", "parity": section})


def run(*checks, tmp_path, formats=FORMATS):
    sink = ListSink()
    parity.run(config(*checks, formats=formats), sink, tmp_path)
    return sink.tables["parity"]


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """right(check) -> its rows of all FORMATS, once for all tests."""
    return functools.cache(lambda check: run(check, tmp_path=tmp_path_factory.mktemp("right")))


@pytest.mark.feature("F17", "T2", "F98", "F155", "F38", "F40", "F47", "F64", "F66")
@pytest.mark.parametrize("check", list(parity.CHECKS))
def test_every_check_passes(check, right):
    rows = right(check)
    assert [r for r in rows if r["status"] == "FAIL"] == []
    assert sum(r["status"] == "PASS" and r["total"] > 0 for r in rows) >= 5
    assert {r["check"] for r in rows} == {"cpu" if check == "kernel" else check}


def test_progress_grows_within_the_longest_check_and_ends_with_the_last(tmp_path):
    sink, phases, parts = ListSink(), [], []
    sink.phase = phases.append
    sink.progress = lambda step, steps, loss, speed, *, part=None: parts.append(step / steps if part is None else part)
    parity.run(config("kernel", "switch"), sink, tmp_path)
    assert phases == ["kernel", "switch"]
    assert parts == sorted(parts) and parts[0] == 0 and parts[-1] == 1
    assert len([part for part in parts if 0 < part < 0.5]) > 5


@pytest.mark.feature("F49", "F48")
def test_routing_covers_all_ordered_pairs(right):
    subjects = {r["subject"] for r in right("routing")}
    assert len(subjects) == 9 * 8 + 8 * 7 * 6 and {"nvfp4|mxfp8", "mxfp8|nvfp4", "nvfp4|mxfp8|fp8_block"} <= subjects


def test_a_wrong_byte_in_a_kernel_is_found(tmp_path, monkeypatch):
    right = operators.quantize

    def wrong(x, rowwise, *arguments):
        buffers = right(x, rowwise, *arguments)
        if rowwise == "mxfp8" and buffers[0].dtype == torch.uint8:
            buffers[0][3, 5] ^= 1
        return buffers

    monkeypatch.setattr(operators, "quantize", wrong)
    failed = [r for r in run("kernel", tmp_path=tmp_path, formats=FEW) if r["status"] == "FAIL"]
    assert {r["subject"] for r in failed} == {"mxfp8"} and len(failed) == 4
    assert failed[0]["first_index"] == "rowwise q[3, 5]"
    assert int(failed[0]["got"], 16) ^ int(failed[0]["expected"], 16) == 1


def test_a_wrong_count_or_sum_in_the_statistics_is_found(tmp_path, monkeypatch):
    right, change = operators.quantize, {}

    def wrong(x, rowwise, *arguments):
        results = right(x, rowwise, *arguments)
        sums = [t for t in results if t.shape[-1] == 8 and t.dtype == torch.float32]
        if rowwise == "mxfp8" and sums:
            sums[0][0, change["entry"]] = sums[0][0, change["entry"]] * change["factor"] + change["more"]
        return results

    monkeypatch.setattr(operators, "quantize", wrong)
    for change["entry"], change["factor"], change["more"] in ((5, 1, 1), (1, 1.001, 0)):
        failed = [r for r in run("statistics", tmp_path=tmp_path, formats=FEW) if r["status"] == "FAIL"]
        assert {r["subject"] for r in failed} == {"mxfp8"} and failed[0]["mismatches"] == 1
        assert failed[0]["first_index"].startswith("rowwise ")
    change.update(entry=1, factor=1 + 1e-7, more=0)
    assert not any(r["status"] == "FAIL" for r in run("statistics", tmp_path=tmp_path, formats=FEW))


def test_a_gradient_from_the_wrong_direction_is_found(tmp_path, monkeypatch):
    right = HybridQuantizer.quantize

    def wrong(self, x, **options):
        return right(HybridQuantizer(self.rowwise, self.rowwise), x, **options)

    monkeypatch.setattr(HybridQuantizer, "quantize", wrong)
    assert any(r["status"] == "FAIL" for r in run("routing", tmp_path=tmp_path, formats=FEW))


@pytest.mark.feature("H35")
def test_experts_that_are_mixed_up_are_found(tmp_path, monkeypatch):
    right = call.mm_t_weights
    monkeypatch.setattr(call, "mm_t_weights", lambda *args, **options: right(*args, **options)[::-1])
    failed = [r for r in run("grouped", tmp_path=tmp_path, formats=FEW) if r["status"] == "FAIL"]
    assert {r["subject"] for r in failed if r["case"] == "list of Linears"} >= {"bf16", "nvfp4|mxfp8", "mxfp8|bf16"}
    assert all(r["first_index"].startswith("dw[") for r in failed if r["case"] == "list of Linears")


@pytest.mark.feature("H35")
def test_experts_that_share_a_history_are_found(tmp_path, monkeypatch):
    """Delayed scaling by the amax of another expert is seen at the second step."""
    right = call_module.quantize_group

    def wrong(*args, states, **options):
        return right(*args, states=states and [states[0]] * len(states), **options)

    monkeypatch.setattr(call_module, "quantize_group", wrong)
    failed = {
        (r["subject"], r["case"]) for r in run("grouped", tmp_path=tmp_path, formats=FEW) if r["status"] == "FAIL"
    }
    assert ("fp8_delayed", "list of Linears") in failed and {subject for subject, _ in failed} == {"fp8_delayed"}


def test_a_router_that_reads_what_experts_read_is_found(tmp_path, monkeypatch):
    """Tokens rounded as the recipe rounds them for the experts."""
    right = LayerNormMoE.forward

    def wrong(self, x):
        read = self.fc1.quantizers.input.quantize(self.norm(x), columnwise=None, key=parity.KEY).rowwise.dequantize()
        with monkeypatch.context() as patch:
            patch.setattr(self.norm, "forward", lambda stream: read)
            return right(self, x)

    monkeypatch.setattr(LayerNormMoE, "forward", wrong)
    failed = {r["subject"] for r in run("grouped", tmp_path=tmp_path, formats=FEW) if r["status"] == "FAIL"}
    assert failed == {text for text in FEW if text not in HIGH}


@pytest.mark.feature("H35")
def test_what_permutations_must_leave_follows_from_the_scales(right):
    """Tokens of blocks move with their blocks only; a scale of the expert or of a row moves with any."""
    cases = {}
    for r in right("grouped"):
        cases.setdefault(r["subject"], set()).add(r["case"])
    anywhere, by_blocks = (
        {f"{name}: {what}" for what in ("y and dx", "dw")} for name in ("permuted tokens", "moved blocks")
    )
    for text in ("bf16", "fp8_current"):
        assert cases[text] >= anywhere and not cases[text] & by_blocks
    for text in ("fp8_block", "mxfp8", "nvfp4", "nvfp4+row_scaled"):
        assert cases[text] >= by_blocks and cases[text] & anywhere == {"permuted tokens: y and dx"}
    assert cases["nvfp4+rht+sr"] == {"list of Linears", "router"}
    for name in ("nvfp4_row_scaled_fwd_mxfp8_bwd", "nvfp4_row_scaled_fwd_mxfp8_bwd_original"):
        expected = by_blocks | {"permuted tokens: y and dx", "list of Linears", "permuted experts"}
        assert cases[name] == expected
    assert cases["fp8_delayed"] == anywhere | {"list of Linears", "permuted experts"}
    assert cases["nvfp4 recipe"] == {"list of Linears"}


def test_the_kernel_of_a_gpu_is_compared_with_the_loop(tmp_path, monkeypatch):
    """torch._grouped_mm runs on a CPU too, under the plans of a GPU."""
    real = torch._grouped_mm
    for scale, status in ((1, "PASS"), (1.02, "FAIL")):
        monkeypatch.setattr(grouped, "grouped_mm", lambda *args, _=scale, **options: real(*args, **options) * _)
        rows = list(parity_grouped.kernel_rows(config("grouped"), torch.device("cpu"), (9, 0)))
        assert [(r["subject"], r["status"]) for r in rows] == [
            (text, status) for text in FORMATS if format_of(text).fits_bf16
        ]


def test_rows_of_byte_comparisons():
    a, b = torch.tensor([1.0, 0.0, torch.nan]), torch.tensor([1.0, -0.0, torch.nan])
    assert row("c", "s", "x", {"t": (a, a)})["status"] == "PASS"  # NaN equals itself, bit by bit
    wrong = row("c", "s", "x", {"t": (a, b)})
    assert (wrong["status"], wrong["first_index"], wrong["expected"], wrong["got"]) == (
        "FAIL",
        "t[1]",
        "0x00000000",
        "0x80000000",
    )
    assert (wrong["mismatches"], wrong["total"]) == (1, 3)
    assert row("c", "s", "x", {"t": (a, a.double())})["status"] == "FAIL"


def test_rewinds_before_it_starts_again(tmp_path):
    sink = ListSink()
    sink.rewind = lambda marks: sink.facts.update(rewound=marks)
    parity.run(config("vanilla"), sink, tmp_path)
    assert sink.facts["rewound"] == {} and sink.facts["device"] == "cpu"


def test_a_held_weight_that_misses_an_update_is_found(tmp_path, monkeypatch):
    right, calls = HybridQuantizedTensor.quantize_, []

    def wrong(self, x, **options):
        calls.append(self)
        return right(self, x if len(calls) != 12 else torch.zeros_like(x), **options)  # of the first update

    monkeypatch.setattr(HybridQuantizedTensor, "quantize_", wrong)
    failed = [r for r in run("weights", tmp_path=tmp_path, formats=FEW) if r["status"] == "FAIL"]
    assert [(r["subject"], r["case"]) for r in failed] == [("bf16", "small GPT"), ("bf16", "small GPT, resumed")]


def test_formats_that_share_a_scale_among_tokens_leak_and_others_do_not(right):
    """NVFP4's scale of the tensor leaks and scales of rows do not, as published (arXiv 2603.24477, section 6.1)."""
    rows = right("causality")
    leaking = {r["subject"] for r in rows if r["note"].startswith("expected: leak")}
    assert leaking == {"fp8_current", "nvfp4", "nvfp4+rht+sr"} and len(rows) == 2 * len(FORMATS)
    assert {r["case"] for r in rows} == {"operand", "outputs of a Linear"}


def test_a_leak_and_a_leak_that_is_missed_are_found(tmp_path, monkeypatch):
    """A row-scaled format under a scale of the tensor leaks; scales that no token changes do not."""
    for wrong in (lambda format: True, lambda format: False):
        with monkeypatch.context() as patch:
            patch.setattr(parity_causality, "shares_scales", wrong)
            rows = run("causality", tmp_path=tmp_path, formats=FEW)
        leaking = {"fp8_current", "nvfp4"}
        failed = {r["subject"] for r in rows if r["status"] == "FAIL"}
        assert failed == (set(FEW) - leaking if wrong(None) else leaking)


def test_recipes_of_the_grouped_check_are_the_packaged_ones():
    packaged = {"nvfp4 recipe": "nvfp4", "fp8_delayed": "delayed_scaling"}
    for name, section in parity_grouped.RECIPES.items():
        recipe = parse_recipe(load_recipe(packaged.get(name, name)))
        assert LinearQuantizers.parse(section, name) == (recipe.grouped_linear or recipe.linear), name


def test_the_other_ways_to_run_a_training_are_compared(monkeypatch):
    """What a GPU has two more columns of; a CPU has one way."""
    monkeypatch.setattr(parity_training, "LOSS_STEPS", 8)
    cpu = torch.device("cpu")
    graph = parity_training.graph_row(config("repeat"), "nvfp4 recipe", cpu)
    operators = parity_training.operators_row(config("repeat"), "nvfp4 recipe", cpu)
    assert (graph["check"], graph["status"], operators["check"], operators["status"]) == (
        "graph", "PASS", "operators", "PASS"
    )  # fmt: skip
    assert graph["total"] > 10_000 and operators["total"] == 8 and "difference 0.0e+00" in operators["note"]


def test_another_loss_in_one_step_is_found(monkeypatch):
    monkeypatch.setattr(parity_training, "LOSS_STEPS", 4)
    right = parity_training._losses

    def wrong(trainer):
        losses = right(trainer)
        losses[2] *= 1.003 if trainer.config.train.compile == "auto" else 1
        return losses

    monkeypatch.setattr(parity_training, "_losses", wrong)
    row = parity_training.operators_row(config("repeat"), "mxfp8", torch.device("cpu"))
    assert (row["status"], row["mismatches"], row["total"]) == ("FAIL", 1, 4) and "3.0e-03" in row["note"]


def test_a_step_whose_bits_depend_on_sampling_is_found(monkeypatch):
    trainer = parity_training._trainer

    def wrong(config, recipe, device, *, sampled=False, **options):
        return trainer(config, recipe, device, sampled=sampled, **options, lr=1e-3 + sampled * 1e-9)

    monkeypatch.setattr(parity_training, "_trainer", wrong)
    row = parity_training.graph_row(config("repeat"), "bf16", torch.device("cpu"))
    assert row["status"] == "FAIL" and row["first_index"].startswith("step 1 ")
