"""quantization() and autocast(): what they restore, and what threads without a value of their own read."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from cases import BASE_LINEARS, HIGH, HYBRID, LOW_BASES, PLAIN, RANDOM, bare, crossed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from hqsweep.config.job import parse as parse_config
from hqsweep.errors import UserError
from hqsweep.formats import parse
from hqsweep.nn import GroupedLinear, Linear, Probe, TransformerOptions, autocast, quantization, quantized_model_init
from hqsweep.nn.core.context import autocast_recipe, current, recomputed, within
from hqsweep.nn.dot_product_attention import DotProductAttention
from hqsweep.nn.transformer import TransformerLayer
from hqsweep.recipe import DpaQuantizers, LinearQuantizers, Recipe
from hqsweep.recipe.pairs import GEMMS
from hqsweep.train.model import build_model

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


FORMATS = {name: section for name, section in BASE_LINEARS.items() if name not in HIGH}
BY_ROWS = [name for name in LOW_BASES if parse(name).row_scaled]
"""Formats with amaxes of rows, which attention refuses."""
ATTENTION = (
    {name: name for name in FORMATS} | dict.fromkeys(BY_ROWS, PLAIN) | {"hybrid": HYBRID, parse(RANDOM).name: RANDOM}
)
WAYS = {
    "reentrant": lambda module, *x: checkpoint(module, *x, use_reentrant=True),
    "not reentrant": lambda module, *x: checkpoint(module, *x, use_reentrant=False),
    "ours": recomputed,
}
TOKENS = torch.arange(64).view(2, 32) % 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.feature("F124", "F162")]
formats = pytest.mark.parametrize("name", FORMATS)
ways = pytest.mark.parametrize("way", WAYS)
EACH_WAY = ("nvfp4", "hybrid")
"""Formats that tests take through every way; other formats go through one of them."""
formats_and_ways = pytest.mark.parametrize(("name", "way"), crossed(FORMATS, WAYS, whole=EACH_WAY))
devices = pytest.mark.parametrize("device", DEVICES)


def linear(text, *, held=False, dtype=torch.bfloat16):
    torch.manual_seed(0)
    with quantized_model_init(enabled=held), quantization(seed=5):
        return Linear(64, 96, name="layer", recipe=bare(text), bias=True, dtype=dtype)


def attention(text):
    return DotProductAttention(name="dpa", recipe=bare(text))


def gpt(name, recompute="none", dpa=True):
    recipe = {"name": "r", "linear": FORMATS[name]} | ({"dpa": ATTENTION[name]} if dpa else {})
    config = {
        "job": "convergence", "sweep": "t", "recipe": recipe,
        "model": {"dim": 64, "layers": 2, "heads": 2}, "data": {"source": "markov"}, "train": {"recompute": recompute},
    }  # fmt: skip
    config = parse_config(config)
    return build_model(config, 16, config.recipe.build())


def draw(*shape, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def run(module, inputs, call=lambda module, *x: module(*x), within=nullcontext):
    """Bytes of the output, the gradients of inputs and of weights; and how often the module ran."""
    runs = []
    hook = module.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    inputs = [x.clone().requires_grad_() for x in inputs]
    module.zero_grad()
    with quantization(seed=1, step=5), within():
        y = call(module, *inputs)
        y.backward(draw(*y.shape, seed=9, device=y.device).to(y.dtype))
    hook.remove()
    tensors = {"y": y.detach()} | {f"d{i}": x.grad for i, x in enumerate(inputs)}
    return tensors | {name: p.grad for name, p in module.named_parameters()}, len(runs)


def assert_the_same(module, inputs, way, *more, **options):
    """more: arguments of the module when it is computed again."""
    module.to(inputs[0].device)
    expected, once = run(module, inputs, **options)
    actual, twice = run(module, inputs, lambda module, *x: WAYS[way](module, *x, *more), **options)
    assert (once, twice) == (1, 2)  # it did happen
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert tensor is not None and torch.equal(tensor, actual[name]), name


@devices
@formats_and_ways
def test_linear(name, way, device):
    assert_the_same(linear(FORMATS[name]), [draw(32, 64, device=device)], way)


@devices
@formats_and_ways
def test_linear_with_a_held_weight(name, way, device):
    module = linear(FORMATS[name], held=True)
    assert_the_same(module, [draw(32, 64, device=device)], way)


@devices
@formats_and_ways
def test_linear_inside_autocast(name, way, device):
    """The module's own recipe would give other bytes."""
    recipe = Recipe(linear=LinearQuantizers.parse(FORMATS[name], "test"))
    module, inputs = linear("bf16"), [draw(32, 64, device=device)]
    assert_the_same(module, inputs, way, within=lambda: autocast(recipe=recipe))
    assert not torch.equal(
        run(module, inputs)[0]["y"], run(module, inputs, within=lambda: autocast(recipe=recipe))[0]["y"]
    )


@pytest.mark.feature("T20")
@devices
@formats_and_ways
def test_linear_whose_weight_operands_are_cached(name, way, device):
    cached = {"within": lambda: quantization(seed=1, step=5, cache_weights=True)}
    module, inputs = linear(FORMATS[name]), [draw(32, 64, device=device)]
    assert_the_same(module, inputs, way, **cached)
    assert_the_same(module, inputs, way, **cached)  # from the cache, from the first forward on


@devices
@formats_and_ways
def test_attention(name, way, device):
    qkv = [draw(2, 128, 32, seed=i, device=device).bfloat16() for i in range(3)]
    assert_the_same(attention(ATTENTION[name]), qkv, way)


@devices
@formats_and_ways
def test_gpt_block(name, way, device):
    assert_the_same(gpt(name).layers[0], [draw(2, 128, 64, device=device)], way)


@pytest.mark.feature("T21")
@pytest.mark.slow
@devices
@formats_and_ways
def test_transformer_layer_with_everything(name, way, device):
    """LayerNorm, biases, GELU, tensors rounded where they are made, and the core of attention again inside of it."""
    linear, dpa = LinearQuantizers.parse(FORMATS[name], "t"), DpaQuantizers.parse(ATTENTION[name], "t")
    options = {"normalization": "LayerNorm", "bias": True, "activation": "gelu", "quantize_boundaries": True}
    recipe, options = Recipe(linear=linear, dpa=dpa), TransformerOptions(**options)
    layer = TransformerLayer(64, 96, 2, name="l", recipe=recipe, options=options)
    inputs = [draw(2, 128, 64, device=device)]
    assert_the_same(layer, inputs, way)
    assert_the_same(layer, inputs, way, True)


@pytest.mark.feature("T21")
@devices
@pytest.mark.parametrize(("name", "part"), crossed(FORMATS, ["layer", "attention"], whole=EACH_WAY))
def test_gpt(name, part, device):
    """The whole model with its own switch, against the one without."""
    runs = []
    for recompute in ("none", part):
        model, tokens = gpt(name, recompute).to(device), torch.arange(256, device=device).view(2, 128) % 16
        nn.init.normal_(model.head.weight, std=0.1, generator=torch.Generator(device).manual_seed(0))
        with quantization(seed=1, step=5):
            y = model(tokens)
            y.backward(draw(*y.shape, device=device))
        runs.append({"y": y.detach()} | {name: p.grad for name, p in model.named_parameters()})
    for name, tensor in runs[0].items():
        assert tensor.abs().sum() > 0 and torch.equal(tensor, runs[1][name]), name


@pytest.mark.parametrize(("part", "layers", "cores"), [("none", 1, 1), ("layer", 2, 2), ("attention", 1, 2)])
def test_what_a_model_computes_again(part, layers, cores, monkeypatch):
    """And that without gradients nothing is."""
    model, ran = gpt("mxfp8", part, dpa=False), []
    model.layers[1].register_forward_pre_hook(lambda *_: ran.append("hook"))
    model.layers[1].mlp.register_forward_pre_hook(lambda *_: ran.append("layer"))
    right = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda *a, **k: (ran.append("core"), right(*a, **k))[1]
    )
    model(TOKENS).sum().backward()
    assert (ran.count("hook"), ran.count("layer"), ran.count("core")) == (1, layers, 2 * cores)
    ran.clear()
    with torch.no_grad():
        model(TOKENS)
    assert (ran.count("layer"), ran.count("core")) == (1, 2)


@pytest.mark.feature("H25")
def test_modules_around_layers_are_called():
    """As torch's checkpoint_wrapper makes them: they have the methods of the layer within, too."""
    model, ran = gpt("mxfp8"), []
    expected, _ = model.hidden(TOKENS)
    model.layers[1].mlp.register_forward_pre_hook(lambda *_: ran.append("mlp"))
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    h, _ = model.hidden(TOKENS)
    h.float().square().sum().backward()
    assert torch.equal(h, expected) and len(ran) == 2


def test_another_word_for_what_is_computed_again_is_refused():
    layer = gpt("mxfp8").layers[0]
    with pytest.raises(UserError, match="TransformerLayer: recompute is 'layers'; it takes none, layer or attention"):
        layer.recompute = "layers"


@pytest.mark.feature("T22")
def test_random_bits_are_replayed_and_not_drawn_again():
    """A function that draws others when it runs again is refused, so that the tests above compare something."""
    module, x = linear("nvfp4|nvfp4+sr"), draw(32, 64)

    def forgetful(module, x):
        def run(x):
            with quantization(seed=len(calls)):
                calls.append(x)
                return module(x)

        calls = []
        return checkpoint(run, x, use_reentrant=False)

    with pytest.raises(UserError, match=r"layer: called within a backward pass.* outside of the quantization\(\)"):
        run(module, [x], forgetful)


@formats
def test_ours_may_run_backward_outside_of_the_contexts(name):
    recipe = Recipe(linear=LinearQuantizers.parse(FORMATS[name], "test"))
    runs = []
    for call in (lambda module, x: module(x), recomputed):
        module, x = linear("bf16"), draw(32, 64).requires_grad_()
        with quantization(seed=1, step=5), autocast(recipe=recipe):
            y = call(module, x)
        y.backward(draw(*y.shape, seed=9).to(y.dtype))
        runs.append((x.grad, module.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("left", ["autocast", "quantization"])
def test_those_of_torch_may_not(way, left):
    """Under a recipe of its own, or other random bits, what is computed again would be something else."""
    within = {"autocast": autocast(recipe=Recipe(linear=LinearQuantizers.parse("mxfp8", "test")))}
    within["quantization"] = quantization(seed=1, step=5)
    module, x = linear("bf16" if left == "autocast" else "nvfp4|nvfp4+sr"), draw(32, 64).requires_grad_()
    with within[left]:
        y = WAYS[way](module, x)
    with pytest.raises(UserError, match=rf"layer: called within a backward pass.* outside of the {left}\(\)"):
        y.sum().backward()
    y = WAYS[way](module, x)  # outside of all
    y.sum().backward()


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_those_of_torch_may_where_it_changes_nothing(way):
    module, x = linear("mxfp8"), draw(32, 64).requires_grad_()
    with quantization(seed=1, step=5):
        y = WAYS[way](module, x)
    y.sum().backward()
    assert module.weight.grad is not None


@ways
def test_a_probe_reports_once(way):
    rows = []
    for call in (lambda module, x: module(x), WAYS[way]):
        probe, module, x = Probe(step=5), linear(FORMATS["nvfp4"]), draw(32, 64).requires_grad_()
        with quantization(seed=1, step=5, probe=probe):
            call(module, x).float().square().sum().backward()
        rows.append(probe.rows)
    assert rows[0] == rows[1] and len(rows[0]) == 9
