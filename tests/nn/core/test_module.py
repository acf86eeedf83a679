"""set_recipe and autocast: what is replaced, what stays, and how often a factory is asked."""

import pickle
from contextlib import nullcontext

import pytest
import torch
from cases import bare
from torch import nn

from hqsweep.config.job import linear_shapes
from hqsweep.config.model import ModelConfig
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import LayerNormLinear, Linear, autocast, quantization, quantized_model_init, set_recipe
from hqsweep.nn.core.context import recomputed
from hqsweep.nn.core.module import quantized_modules
from hqsweep.nn.dot_product_attention import DotProductAttention
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import CustomRecipe, QuantizerRole, Recipe
from hqsweep.recipe.roles import module_roles
from hqsweep.recipe.sectioned import HIGH_PRECISION
from hqsweep.train.model import GPT

MODEL = ModelConfig(dim=32, layers=2, heads=2)


def recipe(linear, **sections):
    return Recipe.from_config({"linear": linear, **sections})


def gpt(linear="mxfp8", **sections):
    torch.manual_seed(0)
    return GPT(MODEL, 32, recipe(linear, **sections), torch.bfloat16)


def linear(quantizers="bf16", name="layers.0.fc"):
    torch.manual_seed(0)
    return Linear(64, 96, name=name, recipe=bare(quantizers))


def mxfp8_inputs(role):
    return "mxfp8" if role.tensor_type == "input" else "bf16"


def test_the_same_recipe_rebuilds_nothing():
    model = gpt()
    before = [module.quantizers for module in quantized_modules(model)]
    assert set_recipe(model, recipe("mxfp8")) == 0
    assert all(m.quantizers is q for m, q in zip(quantized_modules(model), before, strict=True))


@pytest.mark.feature("F4", "F16", "T25")
@pytest.mark.parametrize(
    ("changed", "slots"),
    [
        ({"linear": {"input": "nvfp4|mxfp8", "weight": "mxfp8", "grad_output": "mxfp8"}}, 8),
        ({"overrides": [{"layers": "last(0.15)", "linear": "bf16"}]}, 4 * 3),
        ({"overrides": [{"name": "layers.0.attn.qkv", "linear": "bf16"}]}, 3),
        ({"head": {"weight": "mxfp8"}}, 1),
        ({"norm": "bf16"}, 5),
        ({"embedding": "mxfp8"}, 1),
        ({"gemm": "strict"}, 0),
    ],
)
def test_a_change_rebuilds_exactly_what_differs(changed, slots):
    model = gpt()
    old = {module.name: module.quantizers for module in quantized_modules(model)}
    assert set_recipe(model, recipe(**{"linear": "mxfp8", **changed})) == slots
    for module in quantized_modules(model):
        same = module.quantizers == old[module.name]
        assert same == (module.quantizers is old[module.name])
        for slot in module.slot_roles():  # what stays is the same object
            new, before = getattr(module.quantizers, slot), getattr(old[module.name], slot)
            assert (new is before) == (new == before)
    assert set_recipe(model, recipe("mxfp8")) == slots


@pytest.mark.feature("F16", "T25")
def test_after_a_change_outputs_and_gradients_are_those_of_a_fresh_model():
    changed, fresh = gpt("mxfp8"), gpt("nvfp4|mxfp8", norm="bf16")
    tokens = torch.arange(32)[None]
    changed(tokens).sum().backward()
    changed.zero_grad()
    set_recipe(changed, recipe("nvfp4|mxfp8", norm="bf16"))
    results = []
    for model in (changed, fresh):
        with torch.no_grad():
            model.head.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
        y = model(tokens)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.feature("F9")
def test_a_factory_is_asked_once_for_each_slot_of_linears_and_for_nothing_else():
    asked, model = [], gpt()

    def factory(role):
        asked.append(role)
        return mxfp8_inputs(role)

    changed = set_recipe(model, CustomRecipe(qfactory=factory))
    names = [name for name, _, _ in linear_shapes(MODEL, 32)]
    assert [str(r) for r in asked] == [f"{n}/linear/{t}" for n in names for t in ("input", "weight", "grad_output")]
    assert changed == 8 * 2 + 1  # weights and gradients of the layers become bf16, the head's input mxfp8
    assert str(model.head.quantizers.input) == "mxfp8" and str(model.norm.quantizers.weight) == "fp32"


def test_a_factory_and_the_sections_that_say_the_same_are_the_same_for_a_model():
    sections = {"input": "mxfp8", "weight": "bf16", "grad_output": "bf16"}
    model = gpt(sections, head=sections)
    assert set_recipe(model, CustomRecipe(qfactory=mxfp8_inputs)) == 0


def test_a_model_with_held_weights_holds_them_in_the_formats_of_its_recipe():
    with quantized_model_init():
        model = gpt({"input": "mxfp8", "weight": "nvfp4|mxfp8", "grad_output": "mxfp8"})
    assert str(model.layers[1].mlp.fc2.weight.quantizer) == "nvfp4|mxfp8" and str(model.head.weight.quantizer) == "bf16"
    model(torch.arange(32)[None]).sum().backward()
    set_recipe(model, recipe("mxfp8"))
    with pytest.raises(UserError, match=r"held in nvfp4\|mxfp8, but the recipe asks for mxfp8"):
        model(torch.arange(32)[None])


@pytest.mark.feature("F6")
def test_attention_follows_the_recipe():
    attention = DotProductAttention(name="layers.0.dpa", recipe=HIGH_PRECISION["dpa"])
    x = torch.randn(1, 2, 64, 32).bfloat16()
    plain = attention(x, x, x)
    with autocast(recipe=recipe("bf16", dpa="mxfp8")):
        under_autocast = attention(x, x, x)
    assert torch.equal(attention(x, x, x), plain) and not torch.equal(plain, under_autocast)
    assert set_recipe(attention, recipe("bf16", dpa="mxfp8")) == 4
    assert torch.equal(attention(x, x, x), under_autocast)
    roles = (attention.get_quantizer_roles(fwd=fwd) for fwd in (True, False))
    assert [[role and role.tensor_type for role in each] for each in roles] == [["qkv", "s", None], ["do", "dp", None]]


@pytest.mark.feature("F16", "T25")
def test_a_factory_that_changed_its_mind_is_taken_anew():
    chosen, model = {"format": "mxfp8"}, gpt("mxfp8", head="mxfp8")
    custom = CustomRecipe(qfactory=lambda role: chosen["format"])
    assert set_recipe(model, custom) == 0
    chosen["format"] = "mxfp4"
    assert set_recipe(model, custom) == 27


def test_a_wrong_factory_leaves_the_model_as_it_was():
    model = gpt()
    before = [module.quantizers for module in quantized_modules(model)]
    with pytest.raises(UserError, match=r"head/linear/weight.* returned 3; it must return"):
        set_recipe(model, CustomRecipe(qfactory=lambda r: 3 if str(r) == "head/linear/weight" else "bf16"))
    assert all(m.quantizers is q for m, q in zip(quantized_modules(model), before, strict=True))


def outputs(module, x):
    return module(x).detach()


def test_autocast_nests_and_ends():
    module, x = linear("bf16"), draw("heavy", 32, 64).clamp(-100, 100)
    alone = {text: outputs(linear(text), x) for text in ("bf16", "mxfp8", "nvfp4")}
    assert not torch.equal(alone["mxfp8"], alone["nvfp4"])
    seen = []
    with autocast(recipe=recipe("mxfp8")):
        seen.append(outputs(module, x))
        with autocast(recipe=recipe("nvfp4")):
            seen.append(outputs(module, x))
            with autocast(enabled=False):
                seen.append(outputs(module, x))
        seen.append(outputs(module, x))
    seen.append(outputs(module, x))
    for y, text in zip(seen, ("mxfp8", "nvfp4", "bf16", "mxfp8", "bf16"), strict=True):
        assert torch.equal(y, alone[text]), text
    assert str(module.quantizers.input) == "bf16"  # the module's own are untouched


def test_autocast_ends_when_an_error_leaves_it():
    module, x = linear("bf16"), draw("normal", 32, 64)
    with pytest.raises(ZeroDivisionError), autocast(recipe=recipe("nvfp4")):
        raise ZeroDivisionError
    assert torch.equal(outputs(module, x), outputs(linear("bf16"), x))


def test_backward_runs_on_the_recipe_of_its_forward():
    grads = []
    for module, context in ((linear("bf16"), True), (linear("nvfp4|mxfp8"), False)):
        x = draw("normal", 32, 64).requires_grad_()
        if context:
            with autocast(recipe=recipe("nvfp4|mxfp8")):
                y = module(x)
        else:
            y = module(x)
        y.backward(draw("normal", 32, 96, 1))
        grads.append((x.grad, module.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class Changing:
    """A factory that gives another answer once it is told."""

    def __init__(self):
        self.text, self.asked = "mxfp8", []

    def __call__(self, role):
        self.asked.append(role)
        return self.text


@pytest.mark.feature("F9")
def test_a_factory_is_asked_for_each_slot_and_boundary_once_in_each_autocast():
    factory, module, x = Changing(), linear(), draw("normal", 32, 64)
    custom, sections = CustomRecipe(qfactory=factory), []
    for _ in range(3):
        with autocast(recipe=custom):
            module(x)
            module(x)
            sections.append(module.active_quantizers())
    slots = [*module_roles("linear", module.name), None, None]
    assert factory.asked == slots * 3 and all(section is sections[0] for section in sections)


def made_by(kind):
    """A factory, and what makes it change its mind to mxfp4."""
    factory = Changing()
    if kind == "object":
        return factory, lambda: setattr(factory, "text", "mxfp4")
    if kind == "closure":
        chosen = ["mxfp8"]
        return (lambda role: chosen[0]), lambda: chosen.__setitem__(0, "mxfp4")
    request = type("Request", (), {"text": "mxfp8", "quantizer": lambda self, role: HybridQuantizer.parse(self.text)})()
    return (lambda role: request), lambda: setattr(request, "text", "mxfp4")


@pytest.mark.feature("F16", "T25")
@pytest.mark.parametrize("kind", ["object", "closure", "request"])
def test_the_next_autocast_takes_the_new_answers_of_a_factory_and_the_one_around_it_keeps_its_own(kind):
    factory, change = made_by(kind)
    custom, module, x = CustomRecipe(qfactory=factory), linear(), draw("normal", 32, 64)
    with autocast(recipe=custom):
        before = outputs(module, x)
        change()
        with autocast(recipe=custom):
            after = outputs(module, x)
        assert torch.equal(outputs(module, x), before)
    with autocast(recipe=recipe("mxfp4")):
        assert torch.equal(outputs(module, x), after) and not torch.equal(before, after)
    with autocast(recipe=recipe("mxfp8")):
        assert torch.equal(outputs(module, x), before)


def test_what_backward_computes_again_has_the_answers_of_its_forward():
    grads = []
    for changes in (False, True):
        factory, module = Changing(), linear()
        x = draw("normal", 32, 64).requires_grad_()
        custom = CustomRecipe(qfactory=factory)
        with autocast(recipe=custom):
            y = recomputed(module, x)
        if changes:
            factory.text = "mxfp4"
            with autocast(recipe=custom):
                module(x)
        y.backward(draw("normal", 32, 96, 1))
        grads.append((x.grad, module.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.slow
def test_a_trace_takes_the_new_answers_of_a_factory():
    torch.compiler.reset()
    factory, module, x = Changing(), linear(), draw("normal", 32, 64)
    custom, compiled = CustomRecipe(qfactory=factory), torch.compile(module, backend="eager", fullgraph=True)
    for text in ("mxfp8", "mxfp8", "mxfp4", "mxfp4"):
        factory.text = text
        with autocast(recipe=custom):
            traced = outputs(compiled, x)
        with autocast(recipe=recipe(text)):
            assert torch.equal(traced, outputs(module, x)), text


BOUNDARIES = {
    "linear": (lambda: linear(), [None]),
    "norm and linear": (lambda: LayerNormLinear(64, 96, name="fc", recipe="bf16"), [None]),
    "attention": (
        lambda: DotProductAttention(name="dpa", recipe="bf16"),
        [QuantizerRole(name="dpa.dpa_output"), QuantizerRole(name="dpa.dpa_grad_input")],
    ),
}


@pytest.mark.parametrize("kind", BOUNDARIES)
def test_answers_for_a_boundary_that_nobody_reads_round_nothing(kind):
    (build, boundaries), seen = BOUNDARIES[kind], []

    def factory(role):
        seen.append(role)
        return "mxfp4" if role is None or not role.module_type else "mxfp8"

    module, plain = build(), CustomRecipe(qfactory=lambda role: "mxfp8", fp8_dpa=True)
    x = [draw("normal", 32, 64).view(1, 2, 32, 32)] * 3 if kind == "attention" else [draw("normal", 32, 64)]
    with autocast(recipe=CustomRecipe(qfactory=factory, fp8_dpa=True)):
        y = module(*x).detach()
    with autocast(recipe=plain):
        assert torch.equal(module(*x).detach(), y)
    assert seen[-len(boundaries) :] == boundaries
    assert seen.count(boundaries[0]) == (2 if boundaries[0] is None else 1), "None is asked for each boundary"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (mxfp8_inputs, r"\(None\) raised AttributeError: .* are asked for so: return 'bf16' for them"),
        (lambda role: None if role is None else "mxfp8", r"\(None\) returned None; it must return .* return 'bf16'"),
        (lambda role: "mxfp9" if role is None else "mxfp8", r"\(None\): format 'mxfp9': .* return 'bf16' for them"),
    ],
    ids=["cannot take None", "None", "no format"],
)
def test_a_factory_that_cannot_answer_for_a_boundary_is_refused_in_autocast_alone(factory, message):
    module, custom = linear(), CustomRecipe(qfactory=factory)
    with pytest.raises(UserError, match=message), autocast(recipe=custom):
        module(draw("normal", 32, 64))
    assert set_recipe(module, custom) > 0  # this asks for the slots that it gives to somebody


def test_a_request_for_a_boundary_is_not_asked_for_the_quantizer_of_a_slot():
    class Request:
        def quantizer(self, role):
            return HybridQuantizer.parse("mxfp8" if role.tensor_type == "input" else "bf16")

    with autocast(recipe=CustomRecipe(qfactory=lambda role: Request())):
        assert str(linear().active_quantizers().input) == "mxfp8"


@pytest.mark.feature("F7")
def test_another_boundary_role_is_resolved_at_the_next_call_under_autocast():
    asked, module, x = [], linear(), draw("normal", 32, 64)

    def factory(role):
        asked.append(str(role))
        return "mxfp8" if role is not None and role.name == "next" else "bf16"

    with autocast(recipe=CustomRecipe(qfactory=factory)):
        plain = outputs(module, x)
        module.output_quantizer_role = QuantizerRole("linear", "input", "next")
        rounded = outputs(module, x)
        module.output_quantizer_role = QuantizerRole("linear", "input", "next")
        assert torch.equal(outputs(module, x), rounded) and not torch.equal(plain, rounded)
    slots = [str(role) for role in module_roles("linear", module.name)]
    assert asked == [*slots, "None", "None", "next/linear/input", "None"]  # the answer for a role holds in autocast()


def test_an_override_that_counts_layers_needs_the_model():
    last = recipe("mxfp8", overrides=[{"layers": "last(1)", "linear": "bf16"}])
    with (
        pytest.raises(UserError, match=r"layers last\(1\) counts the layers of a model.* set_recipe"),
        autocast(recipe=last),
    ):
        linear()(draw("normal", 32, 64))


def test_autocast_without_a_recipe_is_an_error():
    with pytest.raises(UserError, match="autocast: recipe is missing"), autocast():
        pass


def test_a_module_pickles_after_autocast_with_a_lambda():
    module, x = linear("mxfp8"), draw("normal", 32, 64)
    with autocast(recipe=CustomRecipe(qfactory=lambda role: "nvfp4")):
        module(x)
    assert torch.equal(outputs(pickle.loads(pickle.dumps(module)), x), outputs(module, x))


def test_a_model_without_modules_is_refused():
    with pytest.raises(UserError, match=r"set_recipe: Sequential has no module of hqsweep.nn; build it of these"):
        set_recipe(nn.Sequential(nn.Linear(4, 4)), recipe("mxfp8"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            {"name": "layers.0.attn.qvk"},
            r"overrides\[0\] \('layers.0.attn.qvk'\) matches no module \(did you mean 'layers.0.attn.qkv'",
        ),
        ({"layers": 7}, r"overrides\[0\] \(layers 7\) matches no module; the model has layers 0 to 1"),
        ({"name": "norm"}, r"overrides\[0\] \('norm'\) matches no module.*; the model has layers.0.attn.qkv to head"),
    ],
    ids=str,
)
def test_overrides_that_match_no_module_are_refused(override, message):
    model = gpt()
    before = [module.quantizers for module in quantized_modules(model)]
    with pytest.raises(UserError, match=message):
        set_recipe(model, recipe("nvfp4", overrides=[{**override, "linear": "bf16"}]))
    assert before == [module.quantizers for module in quantized_modules(model)]
    assert str(linear(recipe("mxfp8", overrides=[{**override, "linear": "bf16"}])).quantizers.input) == "mxfp8"


STOCHASTIC = {"input": "nvfp4", "weight": "nvfp4", "grad_output": "nvfp4+sr"}


def test_two_modules_of_one_name_that_would_draw_the_same_random_bits_are_refused():
    model = nn.Sequential(Linear(64, 64, name="a", recipe="mxfp8"), Linear(64, 64, name="a", recipe="mxfp8"))
    assert set_recipe(model, recipe("nvfp4")) == 6
    message = r"a: 2 modules \(linear\) of this name round stochastically and would draw the same random bits"
    with pytest.raises(UserError, match=message):
        set_recipe(model, recipe(STOCHASTIC))
    assert str(model[0].quantizers.grad_output) == "nvfp4"
    model[1].name = "b"
    assert set_recipe(model, recipe(STOCHASTIC)) == 2


@pytest.mark.parametrize("by_autocast", [False, True])
def test_two_modules_of_one_name_are_refused_when_the_second_draws_in_the_same_step(by_autocast):
    own, x = "bf16" if by_autocast else STOCHASTIC, torch.randn(32, 64)
    first, second = (Linear(64, 64, name="a", recipe=own) for _ in range(2))
    with autocast(recipe=recipe(STOCHASTIC)) if by_autocast else nullcontext():
        with quantization(step=1):
            first(first(x))  # the same module again is no other one
            with pytest.raises(UserError, match=r"a: two modules \(linear\) of this name round stochastically in one"):
                second(x)
        with quantization(step=2):
            second(x)
        with quantization(step=3):
            first(x)
            second.name = "b"
            second(x)
        first(x)
        second(x)


def test_two_modules_of_one_name_may_run_where_nothing_is_random():
    with quantization(step=1):
        for _ in range(2):
            Linear(64, 64, name="a", recipe="format:nvfp4")(torch.randn(32, 64))


def test_the_bits_of_a_module_that_is_gone_are_free():
    with quantization(step=1):
        for _ in range(3):
            Linear(64, 64, name="a", recipe=STOCHASTIC)(torch.randn(32, 64))


@pytest.mark.feature("F16", "T25")
def test_a_change_of_the_columnwise_source_alone_is_a_change():
    """The formats of both directions stay what they are."""
    texts, x = ("nvfp4|mxfp8", "nvfp4|mxfp8@rowwise_dequantized"), draw("normal", 32, 64)
    changed, fresh = linear(texts[0]), linear(texts[1])
    assert set_recipe(changed, recipe(texts[1])) == 3 and changed.quantizers == fresh.quantizers
    gradients = []
    for module in (changed, fresh, linear(texts[0])):
        module(x).backward(draw("normal", 32, 96, 1))
        gradients.append(module.weight.grad)
    assert torch.equal(gradients[0], gradients[1]) and not torch.equal(gradients[0], gradients[2])
