"""Rows of a step of several microbatches, against statistics of all their tensors one below the other in float64."""

import math

import pytest
import torch
from cases import SOME, bare

from hqsweep.config.jobs import TABLES
from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, Probe, quantization
from hqsweep.nn.core.call import slot_name
from hqsweep.nn.core.probe import what_if_rows_of
from hqsweep.ops.stats import gather, output_sums
from hqsweep.quant import HybridQuantizer

SEED, STEP, IN, OUT = 3, 7, 64, 96
TOKENS = (32, 160, 64)
"""Tokens of each microbatch."""
KINDS = ("normal", "heavy", "row_scaled")
"""Kinds of their values, so that microbatches have other amaxes and errors."""


def statistics(x, q):
    """What ops.stats says of q [rows, cols] for x, in the words of its docstring."""
    x, q = x.double(), q.double()
    error, sqnr = x - q, 10 * torch.log10(x.square().sum(1) / (x - q).square().sum(1))
    ordered, last = sqnr.sort().values.tolist(), len(x) - 1
    return {
        "sqnr_db": 10 * math.log10(x.square().sum() / error.square().sum()),
        "rel_l2": math.sqrt(error.square().sum() / x.square().sum()),
        "cosine": float((x * q).sum() / x.norm() / q.norm()),
        "amax": float(x.abs().max()),
        "underflow_pct": 100 * float(((q == 0) & (x != 0)).sum() / (x != 0).sum()),
        "row_sqnr_db_median": ordered[int(0.5 * last)],
        "row_sqnr_db_p5": ordered[int(0.05 * last)],
    }


def batches():
    """x and dy of each microbatch."""
    return [
        (draw(kind, rows, IN, index).bfloat16(), draw(kind, rows, OUT, 9 + index).bfloat16())
        for index, (kind, rows) in enumerate(zip(KINDS, TOKENS, strict=True))
    ]


def train(module, probe, parts, first=0):
    """y, dx and dw of each microbatch."""
    results = []
    for index, (x, dy) in enumerate(parts, first):
        module.zero_grad()
        x = x.clone().requires_grad_()
        with quantization(seed=SEED, step=STEP, microbatch=index, probe=probe):
            y = module(x)
        y.backward(dy)
        results.append((y.detach(), x.grad, module.weight.grad))
    return results


def module(text):
    torch.manual_seed(0)
    return Linear(IN, OUT, name="l", recipe=bare(text))


def rows(probe):
    return {(row["tensor"], row["direction"]): row for row in probe.rows}


def decoded(operand):
    return operand.format.decode(operand.buffers, operand.shape)


def scales_of(operand):
    return operand.format.value_scales(operand.buffers)


@pytest.mark.parametrize("text", SOME)
def test_rows_are_those_of_all_microbatches_together(text):
    linear, probe = module(text), Probe(STEP)
    results = train(linear, probe, batches())
    seen, quantizer = rows(probe), HybridQuantizer.parse(text)
    for tensor, values in zip(("input", "grad_output"), zip(*batches(), strict=True), strict=True):
        keys = [
            RngKey(seed=SEED, slot=slot_name("linear", tensor, "l", None, i), step=STEP) for i in range(len(values))
        ]
        both = [quantizer.quantize(x, key=key) for x, key in zip(values, keys, strict=True)]
        for direction, axis in (("rowwise", 0), ("columnwise", 1)):
            x = torch.cat([v if axis == 0 else v.t() for v in values], axis)
            q = torch.cat([decoded(getattr(each, direction)) for each in both], axis)
            expected = statistics(x, q)
            row = seen[tensor, direction]
            assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5)
            scales = [each for each in (scales_of(getattr(each, direction)) for each in both) if each is not None]
            if scales:
                assert row["scale_min"] == min(s[s > 0].min().item() for s in scales)
                assert row["scale_max"] == max(s.max().item() for s in scales)
    weight = linear.weight.detach().bfloat16().float()
    products = {
        "fprop": [(x.float() @ weight.t(), y) for (x, _), (y, _, _) in zip(batches(), results, strict=True)],
        "dgrad": [(dy.float() @ weight, dx) for (_, dy), (_, dx, _) in zip(batches(), results, strict=True)],
        "wgrad": [(dy.float().t() @ x.float(), dw) for (x, dy), (_, _, dw) in zip(batches(), results, strict=True)],
    }
    for gemm, pairs in products.items():
        expected = statistics(*map(torch.cat, zip(*pairs, strict=True)))
        row = seen[gemm, "output"]
        assert {n: row[n] for n in ("sqnr_db", "rel_l2", "cosine", "amax")} == pytest.approx(
            {n: expected[n] for n in ("sqnr_db", "rel_l2", "cosine", "amax")}, rel=1e-4
        )
        assert row["underflow_pct"] is None


def test_weights_are_counted_once_and_rows_do_not_depend_on_what_is_computed_again():
    one, many, again = Probe(STEP), Probe(STEP), Probe(STEP)
    train(module("mxfp8"), one, batches()[:1])
    train(module("mxfp8"), many, batches())
    for _ in range(2):
        train(module("mxfp8"), again, batches())
    for direction in ("rowwise", "columnwise"):
        assert rows(one)["weight", direction] == rows(many)["weight", direction]
    assert one.rows != many.rows == again.rows


def test_operands_of_microbatch_0_are_captured():
    probe, parts = Probe(STEP, capture=True), batches()
    train(module("mxfp8"), probe, parts)
    assert probe.captured.keys() == {"l.input", "l.weight", "l.grad_output"}
    assert torch.equal(probe.captured["l.input"], parts[0][0])
    assert torch.equal(probe.captured["l.grad_output"], parts[0][1])
    other = Probe(STEP, capture=True)
    train(module("mxfp8"), other, parts[1:], first=1)
    assert not {"l.input", "l.grad_output"} & other.captured.keys()


def test_saturation_counts_each_part_under_its_own_scales():
    """Of 32 values that end at 448, 18 saturate under an amax of 200, and none does under one of 448."""
    format, x = parse("fp8_current"), torch.linspace(14, 448, 32).view(1, 32)
    parts = [gather(x, format, format.encode(x, {"s": torch.tensor([[amax]])})).read() for amax in (200.0, 448.0)]
    above = int((x > 200 * (1 + 2**-8)).sum())
    for below in (True, False):
        assert parts[0].joined(parts[1], below=below).row()["saturation_pct"] == 100 * above / 64
    assert above > 10


def test_shorter_sequences_end_in_zeros_beside_longer_ones():
    format, long, short = parse("mxfp8"), draw("normal", 96, 64), draw("heavy", 32, 64, 1)
    a, b = (gather(x, format, format.encode(x)).read() for x in (long, short))
    filled = torch.cat([short, torch.zeros(64, 64)])
    for own in (a.joined(b, below=False), b.joined(a, below=False)):
        pair = torch.cat([long, filled], 1)
        assert own.row() == pytest.approx(gather(pair, format, format.encode(pair)).row() | {
            "saturation_pct": own.row()["saturation_pct"], "scale_min": own.row()["scale_min"],
        })  # fmt: skip


def test_sums_of_outputs_are_those_of_all_elements():
    expected, actual = (draw("normal", 64, 32, seed).double() for seed in range(2))
    parts = [output_sums(e, a) for e, a in zip(expected.split(16), actual.split(16), strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total.joined(part)
    names = ("sqnr_db", "rel_l2", "cosine", "amax")
    wanted = statistics(expected, actual)
    assert total.row() == pytest.approx({name: wanted[name] for name in names})


def test_the_load_of_an_expert_is_that_of_all_microbatches():
    probe = Probe(STEP)
    for microbatch, tokens in enumerate(([3, 1, 0, 0], [0, 1, 1, 2], [9, 9, 9, 9])):
        for _ in range(2):
            probe.experts("m", tokens, min(microbatch, 1))
    assert [(row["layer"], row["tokens"], row["load"]) for row in probe.rows] == [
        ("m.0", 3.0, 1.5), ("m.1", 2.0, 1.0), ("m.2", 1.0, 0.5), ("m.3", 2.0, 1.0)
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["bf16", "nvfp4"])
def test_other_formats_err_on_the_same_tensors_as_a_module_in_them(text):
    """nvfp4 has random bits and a transform of its own in no other format, so its rows show that nothing is shared."""
    what_if = ("mxfp8", "mxfp4", "nvfp4+2d")
    probe, alone = Probe(STEP, gemms=False, what_if=what_if), Probe(STEP, gemms=False)
    with_others, plain = (train(module(text), each, batches()) for each in (probe, alone))
    for batch, other in zip(with_others, plain, strict=True):
        assert all(map(torch.equal, batch, other))
    assert probe.rows == alone.rows
    found = what_if_rows_of(STEP, probe.samples)
    assert len(found) == len(what_if) * len(probe.rows)
    for other in what_if:
        theirs = Probe(STEP, gemms=False)
        train(module(other), theirs, batches()[:1])  # gradients of later batches depend on no weight: no step is made
        ours = Probe(STEP, gemms=False, what_if=[other])
        train(module("bf16"), ours, batches()[:1])
        rows_of_other = [{name: row[name] for name in TABLES["what_if"]} for row in theirs.rows]
        assert what_if_rows_of(STEP, ours.samples) == rows_of_other
