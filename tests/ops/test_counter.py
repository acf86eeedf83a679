"""Keys whose step is read from a counter on the device draw the bits of that step, whenever it is written."""

from dataclasses import replace

import pytest
import torch
from cases import STOCHASTIC_PAIRS
from support.ops.calls import find_amax, quantize

from hqsweep.formats import RngKey, RngKeys, parse
from hqsweep.formats.inputs import draw
from hqsweep.ops.quantize import operators
from hqsweep.ops.splits import Splits

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
backends = pytest.mark.parametrize("backend", ["reference", "auto"])
STEPS = (5, 2**40 + 3, 2**63 - 1)
PAIR = ("nvfp4+sr", "nvfp4+rht+sr")
OTHER = 1
"""The step in a key that has a counter, which nobody reads."""


def counter_at(step: int, device: str) -> torch.Tensor:
    return torch.tensor([step], device=device)


def counted(key, counter):
    return replace(key, step=OTHER, counter=counter)


def both(x, pair, key, backend, **options):
    keys = {f"{direction}_key": key.under(direction) for direction in ("rowwise", "columnwise")}
    operands = quantize(x, *map(parse, pair), **keys, backend=backend, **options)
    return [tensor for operand in operands[:2] for tensor in operand.values()]


@devices
@backends
@pytest.mark.parametrize("pair", STOCHASTIC_PAIRS, ids="|".join)
def test_one_matrix(device, backend, pair):
    x, key = draw("heavy", 48, 160).to(device), RngKey(seed=7, slot="test", step=0)
    counter, seen = counter_at(0, device), []
    for step in STEPS:
        counter.fill_(step)
        seen.append(both(x, pair, counted(key, counter), backend))
        expected = both(x, pair, replace(key, step=step), backend)
        assert all(torch.equal(*tensors) for tensors in zip(seen[-1], expected, strict=True))
    assert not all(torch.equal(*tensors) for tensors in zip(seen[0], seen[1], strict=True))


@devices
@backends
def test_members(device, backend):
    x, splits = draw("heavy", 96, 160).to(device), Splits.of([32, 0, 48, 16], 96)
    keys = RngKeys(seed=7, slots=tuple("abcd"), step=STEPS[1])
    expected = both(x, PAIR, keys, backend, splits=splits)
    counter = counter_at(STEPS[1], device)
    for own_keys in (counted(keys, counter), Keys(counted(key, counter) for key in keys)):
        actual = both(x, PAIR, own_keys, backend, splits=splits)
        assert all(torch.equal(*tensors) for tensors in zip(actual, expected, strict=True))


class Keys(list):
    def under(self, name):
        return [key.under(name) for key in self]


@devices
@backends
@pytest.mark.parametrize("members", [False, True])
def test_amaxes_of_decoded_rows(device, backend, members):
    x, formats = draw("heavy", 96, 160).to(device), (parse("nvfp4+sr"), parse("fp8_current"))
    splits = Splits.of([32, 64], 96) if members else None
    shape = (2,) if members else (1, 1)
    key = RngKeys(seed=7, slots=("a", "b"), step=9) if members else RngKey(seed=7, slot="a", step=9)
    amaxes = []
    for own in (key, counted(key, counter_at(9, device)), counted(key, counter_at(10, device))):
        amax, out = torch.full(shape, 300.0, device=device), torch.zeros(shape, device=device)
        options = {"columnwise_source": "rowwise_dequantized", "splits": splits, "backend": backend}
        find_amax(x, *formats, rowwise_amax=amax, out_columnwise=out, rowwise_key=own, **options)
        amaxes.append(out)
    assert torch.equal(amaxes[0], amaxes[1]) and amaxes[0].min() > 0


def call(x, step):
    words = [1, 2, 3]
    return operators.quantize(x, "nvfp4+sr", "", False, False, False, words, words, None, None, False,
                              None, None, None, None, False, step)  # fmt: skip


@pytest.mark.parametrize(
    ("step", "got"),
    [
        (torch.zeros(1, dtype=torch.int32), r"torch.int32 \(1,\)"),
        (torch.zeros(2, dtype=torch.int64), r"torch.int64 \(2,\)"),
        (torch.zeros(1, dtype=torch.int64, device="meta"), r"torch.int64 \(1,\) on meta"),
    ],
)
def test_what_is_no_counter_is_refused(step, got):
    with pytest.raises(ValueError, match=rf"step is {got}.*; it takes int64 \[1\] on cpu"):
        call(draw("heavy", 16, 32), step)


def test_keys_of_one_call_have_one_counter():
    x, key = draw("heavy", 32, 32), RngKey(seed=7, slot="test", step=0, counter=counter_at(1, "cpu"))
    options = {"rowwise_key": key, "columnwise_key": replace(key, counter=counter_at(1, "cpu"))}
    with pytest.raises(ValueError, match="several counters"):
        quantize(x, *map(parse, PAIR), **options)


@pytest.mark.slow
def test_the_operator_with_a_counter_keeps_the_rules_of_torch_library():
    x, words = draw("heavy", 32, 64), [1, 2, 3]
    arguments = (x, *PAIR, False, False, False, words, words, None, None, False)
    options = {"step": counter_at(5, "cpu")}
    torch.library.opcheck(torch.ops.hqsweep.quantize.default, arguments, options)


@pytest.mark.feature("H7")
@pytest.mark.gpu
@pytest.mark.parametrize("members", [False, True])
@pytest.mark.parametrize("pair", STOCHASTIC_PAIRS, ids="|".join)
def test_a_cuda_graph_draws_the_bits_of_each_step(pair, members):
    x, counter = draw("heavy", 256, 384).bfloat16().cuda(), counter_at(0, "cuda")
    splits = Splits.of([128, 0, 128], 256) if members else None
    key = RngKeys(seed=7, slots=tuple("abc"), step=0) if members else RngKey(seed=7, slot="a", step=0)
    both(x, pair, counted(key, counter), "auto", splits=splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = both(x, pair, counted(key, counter), "auto", splits=splits)
    for step in STEPS:
        counter.fill_(step)
        graph.replay()
        expected = both(x, pair, replace(key, step=step), "auto", splits=splits)
        assert all(torch.equal(*tensors) for tensors in zip(outputs, expected, strict=True))
