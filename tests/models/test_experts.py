"""Stacked experts by a recipe: the bytes of GroupedLinear, in models that are otherwise as they were."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import bare, crossed
from support.models.tiny import MIXTURES, equal, furthest, step, tiny, tokens
from torch import nn
from torch._dynamo.testing import CompileCounter

import hqsweep
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.models.experts import ExpertsPart, Stack
from hqsweep.nn import GroupedLinear, GroupedLinearOptions, Probe, autocast, quantization, set_recipe
from hqsweep.nn.core.module import quantized_modules
from hqsweep.nn.grouped import ExpertSizes
from hqsweep.ops.splits import Splits
from hqsweep.recipe import Recipe
from tests.models.test_convert import RECIPES

E, K, N = 4, 48, 64
ROUNDED_ONCE = {"input": "fp32", "weight": "fp32", "grad_output": "fp32|bf16"}
"""Forward and dgrad in float32, and no identity: gradients of weights pass through bfloat16."""


class GroupedExperts(nn.Module):
    """torchtitan's, with the loop over experts in place of torch._grouped_mm."""

    def __init__(self, experts=E, dim=K, hidden=N):
        super().__init__()
        self.w1_EFD = nn.Parameter(draw("normal", experts * hidden, dim).float().view(experts, hidden, dim) / 8)
        self.w2_EDF = nn.Parameter(draw("normal", experts * dim, hidden).float().view(experts, dim, hidden) / 8)
        self.w3_EFD = nn.Parameter(draw("normal", hidden, experts * dim).float().view(experts, hidden, dim) / 8)

    def forward(self, x_RD, num_tokens_per_expert_E):
        out = []
        for e, x in enumerate(x_RD.split(num_tokens_per_expert_E.tolist())):
            hidden = F.silu(x @ self.w1_EFD[e].T) * (x @ self.w3_EFD[e].T)
            out.append(hidden @ self.w2_EDF[e].T)
        return torch.cat(out)


class Titan(nn.Module):
    """Rows that are sorted by their experts, through these."""

    def __init__(self):
        super().__init__()
        self.experts = GroupedExperts()

    def forward(self, x, counts):
        return self.experts(x, counts)


def titan_step(model, x, counts):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x, counts)
    y.square().mean().backward()
    return y.detach(), {"x": x.grad} | {name: p.grad.clone() for name, p in model.named_parameters()}


ROWS, COUNTS = draw("normal", 40, K).float(), torch.tensor([7, 0, 16, 17])


@pytest.mark.feature("H36")
@pytest.mark.parametrize(
    ("recipe", "transposed", "bias", "dtype"),
    crossed(RECIPES, [False, True], [False, True], [torch.float32, torch.bfloat16], whole=[*RECIPES[-2:], "mxfp8"]),
    ids=str,
)
def test_bytes_are_those_of_grouped_linear(recipe, transposed, bias, dtype):
    """In the dtype of the call, of float32 weights; also where these lie as [E, in, out]: a transposed view is read."""
    options = GroupedLinearOptions(single_grouped_weight=True, single_grouped_bias=True, bias=bias)
    ours = GroupedLinear(E, K, N, name="experts.up", recipe=bare(recipe), dtype=dtype, options=options)
    holder = nn.Module()
    held = ours.weight.detach().transpose(1, 2).contiguous() if transposed else ours.weight.detach().clone()
    holder.up = nn.Parameter(held)
    biases = nn.Parameter(torch.arange(E * N).view(E, N) / 100) if bias else None
    stack, sizes = Stack("up", transposed=transposed), ExpertSizes(E, K, N)
    assert stack.sizes_of(holder) == sizes
    part = ExpertsPart(holder, stack, "experts", bare(recipe))
    if bias:
        with torch.no_grad():
            ours.bias.copy_(biases)
    results = []
    for call in (
        lambda x: ours(x, COUNTS),
        lambda x: part(x, Splits.of(COUNTS, 40), stack.weight_of(holder), biases, dtype),
    ):
        x = ROWS.clone().requires_grad_()
        with quantization(seed=3, step=5):
            y = call(x)
            y.float().square().mean().backward()
        results.append((y, x.grad))
    dw = holder.up.grad.transpose(1, 2) if transposed else holder.up.grad
    assert all(map(torch.equal, *results)) and torch.equal(dw, ours.weight.grad)
    assert not bias or torch.equal(biases.grad, ours.bias.grad)


@pytest.mark.feature("H36")
@pytest.mark.parametrize("kind", MIXTURES)
def test_model(kind):
    """In identities it is the original to the bit. By our products, in float32, it is so up to the order of sums, and
    gradients up to a rounding to bfloat16. In mxfp8 all parts work, and revert leaves nothing behind."""
    model = tiny(kind)
    experts = next(module for name, module in model.named_modules() if name.endswith("mlp.experts"))
    plain, keys, attributes, cls = step(model), list(model.state_dict()), dict(vars(experts)), type(experts)
    conversion = hqsweep.convert(model, "fp32")
    assert equal(step(model), plain) and conversion.unused() == []
    names = [each.name for each in conversion.modules if each.kind == "experts"]
    assert names[-2:] == ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]
    shapes = {each.name: each.shape for each in conversion.modules}
    assert [shapes[name] for name in names[-2:]] == [(96, 64), (64, 48)]
    set_recipe(model, Recipe.from_config({"linear": ROUNDED_ONCE}))
    ours = step(model)
    assert torch.allclose(ours[0], plain[0], rtol=0, atol=1e-5) and 1e-5 < furthest(ours, plain) < 0.02
    set_recipe(model, Recipe.from_config({"linear": "mxfp8"}))
    low = step(model)
    assert 1e-4 < (low[0] - plain[0]).abs().max() < 0.2 * plain[0].abs().max()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(step(other), low) and isinstance(next(iter(other.model.layers[1].mlp.modules())), nn.Module)
    assert list(model.state_dict()) == keys and isinstance(experts, cls) and type(experts) is not cls
    hqsweep.revert(model)
    assert type(experts) is cls and vars(experts) == attributes and equal(step(model), plain)


@pytest.mark.feature("H36")
def test_torchtitan():
    model = Titan()
    plain = titan_step(model, ROWS, COUNTS)
    assert str(hqsweep.convert(model, "fp32")) == (
        "converted 3 experts, 100 % of the model's multiplications by weights; nothing is quantized"
    )
    assert equal(titan_step(model, ROWS, COUNTS), plain)
    set_recipe(model, Recipe.from_config({"linear": ROUNDED_ONCE}))
    ours = titan_step(model, ROWS, COUNTS)
    assert torch.allclose(ours[0], plain[0], rtol=0, atol=1e-5) and 1e-5 < furthest(plain, ours) < 0.01
    assert torch.allclose(ours[1]["x"], plain[1]["x"], rtol=0, atol=1e-6)
    model.experts.activation_fn = lambda gate, up: gate * up
    assert not torch.allclose(titan_step(model, ROWS, COUNTS)[0], ours[0])
    assert hqsweep.revert(model) == 1 and type(model.experts) is GroupedExperts


def test_a_recipe_names_experts():
    """By their section, and by the name of the module and the parameter; experts of one product have one quantizer."""
    model = Titan()
    overrides = [{"name": "experts.w2_EDF", "grouped_linear": "nvfp4"}]
    conversion = hqsweep.convert(model, {"linear": "bf16", "grouped_linear": "mxfp8", "overrides": overrides})
    formats = [each.formats["input"] for each in conversion.modules]
    assert formats == ["mxfp8", "nvfp4", "mxfp8"]
    roles = [role for part in quantized_modules(model) for role in part.slot_roles().values() if role]
    assert str(roles[0]) == "experts.w1_EFD/grouped_linear/input/0" and len(roles) == 3 * E * 3


def test_autocast_probe_and_random_bits_reach_experts():
    model = Titan()
    hqsweep.convert(model, {"linear": {"input": "mxfp8", "weight": "mxfp8", "grad_output": "nvfp4+sr"}})
    with quantization(seed=1, step=1):
        first, second = titan_step(model, ROWS, COUNTS), titan_step(model, ROWS, COUNTS)
    with quantization(seed=1, step=2):
        other = titan_step(model, ROWS, COUNTS)
    assert equal(first, second) and not equal(first, other)
    with autocast(recipe=Recipe.from_config({"linear": "fp32"})):
        assert torch.equal(model(ROWS, COUNTS), Titan()(ROWS, COUNTS))
    probe = Probe(0)
    with quantization(probe=probe):
        titan_step(model, ROWS, COUNTS)
    layers = {row["layer"] for row in probe.rows if row["tensor"] == "input"}
    assert layers == {f"experts.{w}.{e}" for w in ("w1_EFD", "w2_EDF", "w3_EFD") for e in (0, 2, 3)}
    assert [row["tokens"] for row in probe.rows if row["tensor"] == "routed"] == [7.0, 0.0, 16.0, 17.0]


@pytest.mark.feature("H36")
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_probe_changes_no_bit_of_high_precision(recomputed):
    """The plain forward runs, and the probe sees products that are computed beside it."""
    model = tiny("mixtral")
    if recomputed:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    plain, probe = step(model), Probe(0)
    hqsweep.convert(model, "fp32")
    with quantization(probe=probe):
        probed = step(model)
    assert equal(probed, plain)
    rows = [row for row in probe.rows if row["layer"].startswith("model.layers.0.mlp.experts.down_proj.")]
    assert {row["tensor"] for row in rows} == {"input", "weight", "grad_output", "fprop", "dgrad", "wgrad"}
    assert all(row["rel_l2"] < 1e-5 for row in rows if row["tensor"] in ("fprop", "dgrad", "wgrad"))


@pytest.mark.slow
def test_a_compiled_mixture_is_traced_once():
    """For all layers, and for every routing: on a CPU experts by the recipe stay outside of the graphs."""
    model = tiny("mixtral")
    hqsweep.convert(model, "mxfp8")
    plain, graphs = step(model), CompileCounter()
    for layer in model.model.layers:
        layer.compile(backend=graphs)
    conversion = hqsweep.conversion_of(model)
    conversion.reset()
    assert equal(step(model), plain) and conversion.unused() == []
    traced = graphs.frame_count
    model(tokens().flip(1), use_cache=False)
    assert graphs.frame_count == traced


def test_torch_autocast_gives_the_dtype():
    model = Titan()
    hqsweep.convert(model, "mxfp8")
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(ROWS.bfloat16(), COUNTS)
    y = model.to(torch.bfloat16)(ROWS.bfloat16(), COUNTS)
    assert rounded.dtype == y.dtype == torch.bfloat16 and (rounded - y).abs().max() <= 0.02 * y.abs().max()


def test_what_passes_by_is_named():
    model = Titan()
    conversion = hqsweep.convert(model, "mxfp8")
    F.linear(ROWS, model.experts.w1_EFD[0])
    assert conversion.unused() == ["experts.w1_EFD", "experts.w2_EDF", "experts.w3_EFD"]
    model(ROWS, COUNTS)
    assert conversion.unused() == []


class Clamped(GroupedExperts):
    """A forward that only its author knows."""


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Clamped(), nn.Linear(64, 64)


@pytest.mark.feature("H36")
def test_what_is_not_taken_is_named():
    skipped = hqsweep.convert(Two(), "mxfp8").skipped
    assert [each.name for each in skipped] == ["a"]
    assert skipped[0].why.startswith(
        "what Clamped computes of its stacked weights is not known: w1_EFD (4, 64, 48) and"
    )
    model = tiny("mixtral")
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    reasons = {each.name: each.why for each in hqsweep.convert(model, "mxfp8").skipped}
    assert reasons["model.layers.0.mlp.experts"] == "its experts are spread over ranks"
    assert {each.kind for each in hqsweep.convert(tiny("mixtral"), "mxfp8", experts=False).modules} == {"linear"}


def test_widths_that_a_format_cannot_take():
    model = Titan()
    model.experts = GroupedExperts(hidden=40)
    with pytest.raises(UserError, match=r"experts\.w2_EDF.* 40 element.*multiple of 16"):
        hqsweep.convert(model, "format:nvfp4")
    assert type(model.experts) is GroupedExperts and not quantized_modules(model)


def test_delayed_scaling_of_experts_is_in_the_conversion():
    model, fresh = Titan(), Titan()
    conversion = hqsweep.convert(model, "fp8_delayed")
    for step_ in range(2):
        with quantization(step=step_):
            titan_step(model, ROWS * (1 + step_), COUNTS)
    assert not any("states" in key for key in model.state_dict())
    hqsweep.convert(fresh, "fp8_delayed").load_state_dict(conversion.state_dict())
    with quantization(step=2):
        assert equal(titan_step(model, ROWS, COUNTS), titan_step(fresh, ROWS, COUNTS))


def test_saved_files_have_the_keys_of_the_plain_model(tmp_path):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model, keys = tiny("mixtral"), []
    for folder in ("plain", "converted"):
        model.save_pretrained(tmp_path / folder)
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            keys.append(sorted(file.keys()))
        hqsweep.convert(model, {"linear": "mxfp8", "dpa": "mxfp8"})
    assert keys[0] == keys[1] and any("experts.0" in key for key in keys[0])
    assert (tmp_path / "plain" / "config.json").read_text() == (tmp_path / "converted" / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32, local_files_only=True)
    hqsweep.convert(loaded, {"linear": "mxfp8", "dpa": "mxfp8"})
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, model.eval()(tokens()).logits)


def test_adapters_of_stacked_weights():
    """PEFT parametrizes the class of the experts: weights are read by attribute, and the frozen base gets no dw."""
    from peft import LoraConfig, get_peft_model

    model = tiny("mixtral")
    hqsweep.convert(model, "mxfp8")
    plain = step(model)[0]
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=[], target_parameters=names))
    first = step(wrapped)
    assert torch.equal(first[0], plain) and all("lora_" in name for name in first[1])
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    assert not torch.equal(step(wrapped)[0], plain)
