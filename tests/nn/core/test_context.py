"""quantization() and autocast(): what they restore, and what threads without a value of their own read."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from hqsweep.errors import UserError
from hqsweep.formats import parse
from hqsweep.nn import GroupedLinear, Linear, autocast, quantization
from hqsweep.nn.core.context import autocast_recipe, current, within
from hqsweep.recipe import LinearQuantizers, Recipe
from hqsweep.recipe.pairs import GEMMS

RECIPE = Recipe(linear=LinearQuantizers.parse("mxfp8", "test"))


def seen_by_a_fresh_thread():
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: (current().seed, current().step, autocast_recipe())).result()


@pytest.mark.feature("F124", "F162")
def test_a_fresh_thread_reads_the_innermost_contexts_and_nothing_after_them():
    assert seen_by_a_fresh_thread() == (0, None, None)
    with quantization(seed=3, step=7), autocast(recipe=RECIPE):
        assert seen_by_a_fresh_thread() == (3, 7, RECIPE)
        with quantization(seed=4), autocast(enabled=False):
            assert seen_by_a_fresh_thread()[:2] == (4, 0)
            assert str(seen_by_a_fresh_thread()[2].linear.input) == "bf16"
        assert seen_by_a_fresh_thread() == (3, 7, RECIPE)
    assert seen_by_a_fresh_thread() == (0, None, None)


def test_exceptions_restore():
    with quantization(seed=1):
        with pytest.raises(ZeroDivisionError), quantization(seed=2), autocast(recipe=RECIPE):
            raise ZeroDivisionError
        assert (current().seed, autocast_recipe()) == (1, None)
        assert seen_by_a_fresh_thread() == (1, 0, None)


def test_a_thread_with_a_value_of_its_own_keeps_it_and_leaves_in_any_order():
    outer, inner = quantization(seed=1), quantization(seed=2)
    with ThreadPoolExecutor(1) as other:
        outer.__enter__()
        other.submit(inner.__enter__).result()
        assert current().seed == 1 and other.submit(lambda: current().seed).result() == 2
        outer.__exit__(None, None, None)  # before the one that was entered later
        assert seen_by_a_fresh_thread()[0] == 2
        other.submit(inner.__exit__, None, None, None).result()
    assert seen_by_a_fresh_thread()[0] == 0


def test_a_module_called_in_a_fresh_thread_draws_the_bits_of_the_step():
    quantizers = LinearQuantizers.parse("nvfp4+sr|mxfp8", "test")
    module, x = Linear(64, 96, name="layer", recipe=quantizers), torch.randn(32, 64)
    with quantization(seed=3, step=7), ThreadPoolExecutor(1) as threads, torch.no_grad():
        here, there = module(x), threads.submit(module, x).result()
        assert torch.equal(here, there)
    with torch.no_grad():
        assert not torch.equal(module(x), here)


def of_step(context, device):
    """The output and the gradients of a linear and of experts that round all that they read stochastically."""
    torch.manual_seed(0)
    recipe = Recipe.from_config(dict.fromkeys(("linear", "grouped_linear"), "nvfp4+sr"))
    linear = Linear(32, 48, bias=False, name="a", recipe=recipe).to(device)
    experts = GroupedLinear(2, 48, 32, name="b", recipe=recipe).to(device)
    x = torch.randn(64, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    with quantization(**context):
        y = experts(linear(x), [48, 16])
    y.float().square().mean().backward()
    return [y, x.grad, linear.weight.grad, *(p.grad for p in experts.parameters())]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_counter_stands_for_the_step_of_random_bits(device):
    wanted, other = (of_step({"seed": 1, "step": step}, device) for step in (2**33 + 1, 4))
    counter = torch.tensor([2**33 + 1], device=device)
    counted = of_step({"seed": 1, "step": 4, "counter": counter}, device)
    assert all(map(torch.equal, counted, wanted)) and not torch.equal(counted[0], other[0])


@pytest.mark.parametrize("counter", [torch.zeros(2, dtype=torch.int64), torch.zeros(1)])
def test_what_is_no_counter_is_refused(counter):
    with pytest.raises(UserError, match=rf"counter is {counter.dtype} \({len(counter)},\); it takes int64 \[1\]"):
        quantization(counter=counter)


@pytest.mark.feature("H3")
def test_a_reader_sees_the_codes_of_every_product_and_changes_no_bit():
    """Codes and scales are those of the formats' own reference."""
    texts = {
        "input": ("mxfp8", "nvfp4+rht"),
        "weight": ("fp8_current", "fp8_block"),
        "grad_output": ("mxfp4", "nvfp4+rht"),
    }
    linear = Linear(
        64, 96, name="m", recipe=LinearQuantizers.parse({t: "|".join(own) for t, own in texts.items()}, "test")
    )
    matrices = {"input": torch.randn(32, 64), "weight": linear.weight.detach(), "grad_output": torch.randn(32, 96)}
    matrices = {tensor: matrix.bfloat16() for tensor, matrix in matrices.items()}
    read = {}

    def note(call, gemm, *operands):
        read.update(zip(((call.layer, *slot) for slot in GEMMS[gemm]), operands, strict=True))

    results = []
    for reader in (None, note):
        x = matrices["input"].clone().requires_grad_()
        linear.zero_grad()
        with within(replace(current(), reader=reader)):
            y = linear(x)
        y.backward(matrices["grad_output"])
        results.append((y.detach(), x.grad, linear.weight.grad))
    assert all(map(torch.equal, *results)) and len(read) == 6
    for (_, tensor, direction), operand in read.items():
        matrix, index = matrices[tensor], ("rowwise", "columnwise").index(direction)
        expected = parse(texts[tensor][index]).encode(matrix.t() if index else matrix)
        assert all(torch.equal(expected[name], buffer) for name, buffer in operand.buffers.items())
