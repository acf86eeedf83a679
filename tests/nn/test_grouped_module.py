"""GroupedLinear as a module: splits, padding, roles, quantizers of experts, states."""

from contextlib import nullcontext

import pytest
import torch
from cases import BY_STEP, LINEARS, LOW_BASES, WHOLE_BLOCKS, crossed
from support.nn.experts import (
    EXPERTS,
    GPU,
    ROWS,
    SECTIONS,
    SPLITS,
    K,
    N,
    assert_same_gradients,
    gradients,
    grouped,
    hidden,
    ids,
    recipe_of,
    singles,
    train,
)

from hqsweep.errors import UserError
from hqsweep.formats import parse
from hqsweep.formats.inputs import draw
from hqsweep.gemm.exact import mm_t
from hqsweep.nn import GroupedLinear, autocast, quantization, set_recipe
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import CustomRecipe, QuantizerRole, Recipe
from hqsweep.recipe.roles import module_roles


@pytest.mark.feature("T6", "F94")
@pytest.mark.parametrize(
    ("quantizers", "alignment"),
    [("bf16", 1), ("mxfp8", 1), ("mxfp4", 2), ("nvfp4", 16), ("nvfp4|mxfp8", 1), ("fp8_block|nvfp4", 16)],
)
def test_alignment_is_that_of_the_formats_of_this_module(quantizers, alignment):
    module = grouped(quantizers)
    assert module.quantization_alignment == alignment
    with autocast(recipe=recipe_of("nvfp4")):
        assert module.quantization_alignment == 16
    only_gradients = grouped({"input": "mxfp8", "weight": "nvfp4", "grad_output": "mxfp8|nvfp4"})
    assert only_gradients.quantization_alignment == 16


@pytest.mark.feature("F94")
@pytest.mark.parametrize("quantizers", [*WHOLE_BLOCKS, SECTIONS[0]], ids=ids)
def test_experts_are_filled_up_with_zeros_where_blocks_need_it(quantizers):
    """The bytes are as if zeros had been there from the start; the rows that were added leave nothing behind."""
    module, splits, padded = grouped(quantizers, bias=True), (7, 0, 16, 33), (16, 0, 16, 48)
    x, dy = draw("heavy", 56, K).clamp(-50, 50), draw("normal", 56, N, 1)

    def filled(rows):
        parts = zip(rows.split(splits), padded, strict=True)
        return torch.cat([torch.nn.functional.pad(p, (0, 0, 0, m - len(p))) for p, m in parts])

    def without_zeros(rows):
        return torch.cat([p[:m] for p, m in zip(rows.split(padded), splits, strict=True)])

    runs = []
    for rows, gradient, sizes in ((x, dy, splits), (filled(x), filled(dy), padded)):
        module.zero_grad()
        rows = rows.clone().requires_grad_()
        y = module(rows, sizes)
        y.backward(gradient)
        runs.append((y.detach(), rows.grad, gradients(module)))
    (y, dx, ours), (y_filled, dx_filled, theirs) = runs
    assert torch.equal(y, without_zeros(y_filled)) and torch.equal(dx, without_zeros(dx_filled))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with torch.no_grad():
        assert torch.equal(module(x, splits), y)  # a forward alone needs no zeros


@pytest.mark.feature("F94", "H33")
def test_nothing_is_copied_where_splits_fit(monkeypatch):
    module, seen, real = grouped("nvfp4"), [], GroupedLinear._apply_experts

    def spy(self, x, *others):
        seen.append(x.data_ptr())
        return real(self, x, *others)

    monkeypatch.setattr(GroupedLinear, "_apply_experts", spy)
    x = draw("normal", ROWS, K)
    module(x, SPLITS)
    module(x[:50], (16, 0, 1, 33))
    assert seen[0] == x.data_ptr() and seen[1] != x.data_ptr()


def test_wrong_splits():
    module, x = grouped(), draw("normal", ROWS, K)
    for splits, message in (
        ((64, 64), r"experts: m_splits has 2 entries for 4 experts"),
        ((64, 65, 0, 0), r"experts: m_splits adds up to 129 rows, and the matrix has 128"),
        ((-1, 129, 0, 0), r"experts: m_splits has -1 for expert 0"),
        (torch.ones(4), r"experts: m_splits is torch.float32"),
    ):
        with pytest.raises(UserError, match=message):
            module(x, splits)


def by_expert(**special):
    """A factory of mxfp8, and for expert 2 something else in the tensors that are named."""

    def factory(role):
        return special.get(role.tensor_type, "mxfp8") if role is not None and role.expert == 2 else "mxfp8"

    return CustomRecipe(qfactory=factory)


@pytest.mark.feature("F74", "F77", "F84")
@pytest.mark.parametrize(
    ("special", "message"),
    [
        ({"input": "nvfp4|mxfp8"}, "experts: input of expert 2 .* the family of its rowwise operand"),
        ({"weight": "mxfp8|fp8_block"}, "experts: weight of expert 2 .* the family of its columnwise operand"),
        ({"weight": "mxfp8+2d"}, "experts: weight of expert 2 .* the options of its rowwise operand"),
        ({"grad_output": "bf16|mxfp8"}, "experts: grad_output of expert 2 .* high precision of its rowwise operand"),
        ({"input": "mxfp8@rowwise_dequantized"}, "experts: input of expert 2 .* in columnwise_source"),
    ],
)
def test_experts_that_differ_are_refused(special, message):
    """When the module is built, when a recipe is set, and under autocast."""
    with pytest.raises(UserError, match=message):
        GroupedLinear(EXPERTS, K, N, name="experts", recipe=by_expert(**special))
    module = grouped("mxfp8")
    before = module.quantizers
    with pytest.raises(UserError, match=message):
        set_recipe(module, by_expert(**special))
    with pytest.raises(UserError, match=message), autocast(recipe=by_expert(**special)):
        module(draw("normal", ROWS, K), SPLITS)
    assert module.quantizers is before


class Halved(HybridQuantizer):
    """A quantizer of somebody else."""

    def quantize(self, x, **options):
        return super().quantize(x * 0.5, **options)


HALVED = Halved(parse("mxfp8"), parse("nvfp4+sr"))


@pytest.fixture
def calls(monkeypatch):
    """Shapes that the custom quantizer was called with."""
    seen, real = [], Halved.quantize
    monkeypatch.setattr(Halved, "quantize", lambda self, x, **o: seen.append(tuple(x.shape)) or real(self, x, **o))
    return seen


@pytest.mark.feature("F78")
def test_custom_quantizers_are_called_for_each_expert(calls):
    asked = []

    def factory(role):
        asked.append(role)
        return HALVED if role.tensor_type == "input" else "mxfp8"

    module = GroupedLinear(EXPERTS, K, N, name="experts", recipe=CustomRecipe(qfactory=factory))
    assert len(asked) == len(set(asked)) == 3 * EXPERTS and module.quantizers.input is HALVED
    ours, theirs = train(module, singles(module), steps=1)
    assert calls == [(m, K) for m in SPLITS] * 2
    assert_same_gradients(ours, theirs)


def test_roles_are_of_tensor_and_expert():
    module = grouped()
    roles = [QuantizerRole("grouped_linear", t, "experts", e) for e in range(EXPERTS) for t in ("input", "weight")]
    assert module.get_quantizer_roles(fwd=True) == [*roles, None]
    assert str(roles[-1]) == "experts/grouped_linear/weight/3"
    gradient = [QuantizerRole("grouped_linear", "grad_output", "experts", e) for e in range(EXPERTS)]
    assert module.get_quantizer_roles(fwd=False) == [*gradient, None]
    for e in range(EXPERTS):
        recipe = recipe_of("mxfp8")
        assert recipe.quantizer(roles[2 * e]) == recipe.quantizer(module_roles("grouped_linear", "experts")[0])


READERS = {"output": QuantizerRole("linear", "input", "next"), "grad_input": QuantizerRole("linear", "input", "last")}


def bounded(reader, quantizers="mxfp8", slots=tuple(READERS), **options):
    """A grouped linear whose output, and the gradient it returns, are read in another format."""
    module = grouped(quantizers, **options)
    for slot in slots:
        setattr(module, module.BOUNDARIES[slot], READERS[slot])
    overrides = [{"name": role.name, "linear": reader} for slot, role in READERS.items() if slot in slots]
    recipe = Recipe.from_config({"linear": "bf16", "grouped_linear": quantizers, "overrides": overrides})
    assert set_recipe(module, recipe) == len(slots)
    return module


@pytest.mark.parametrize(
    ("reader", "quantizers", "splits"),
    crossed(
        [*LOW_BASES, *BY_STEP[1:], "bf16|mxfp8"],
        ["bf16", "nvfp4"],  # nvfp4 is filled up
        [SPLITS, (ROWS // EXPERTS,) * EXPERTS, (7, 0, 33, ROWS - 40)],
        whole=("mxfp8", "nvfp4"),
    ),
    ids=str,
)
def test_boundaries_are_rounded_as_those_of_each_experts_linear(quantizers, reader, splits):
    module = bounded(reader, quantizers, bias=True)
    if quantizers == "nvfp4":
        splits = tuple(size // 16 * 16 for size in splits)  # a Linear takes whole blocks
    assert_same_gradients(*train(module, singles(module), splits))


@pytest.mark.feature("F7")
def test_boundary_slots_have_a_role_for_all_experts():
    module = bounded("fp8_current")
    assert module.get_quantizer_roles(fwd=True)[-1] == READERS["output"]
    assert module.get_quantizer_roles(fwd=False)[-1] == READERS["grad_input"]
    assert str(module.quantizers.output) == str(module.quantizers.grad_input) == "fp8_current"
    module.output_quantizer_role = None
    assert module.quantizers.output is None and module.quantizers.grad_input is not None


@pytest.mark.feature("F7")
@pytest.mark.parametrize("slot", READERS)
@pytest.mark.parametrize("quantizers", ["mxfp8", "nvfp4"])  # nvfp4 is filled up, and a bias is no zero
def test_a_boundary_is_rounded_expert_by_expert_also_where_a_device_alone_knows_the_splits(quantizers, slot):
    plain, splits, format = grouped(quantizers, bias=True), (7, 0, 16, 33), parse("fp8_current")
    modules = [plain, *(bounded("fp8_current", quantizers, (slot,), bias=True) for _ in range(2))]
    results = []
    for module, sizes in zip(modules, (splits, splits, hidden(splits)), strict=True):
        x = draw("heavy", sum(splits), K).clamp(-50, 50).requires_grad_()
        y = module(x, list(sizes) if sizes is splits else sizes)
        y.backward(draw("normal", sum(splits), N, 1))
        results.append({"output": y.detach(), "grad_input": x.grad})
    unrounded, *rounded = results
    parts = [part for part in unrounded[slot].split(splits) if len(part)]
    expected = torch.cat([format.decode(format.encode(part), tuple(part.shape)).bfloat16() for part in parts])
    assert not torch.equal(expected, unrounded[slot])
    for result in rounded:
        assert all(torch.equal(result[name], expected if name == slot else unrounded[name]) for name in result)


def test_another_recipe_is_taken_for_all_experts():
    module = grouped("fp8_delayed")
    train(module, singles(module), steps=1)
    assert all(len(states) for states in module.states)
    assert set_recipe(module, recipe_of("nvfp4|mxfp8")) == 3
    assert not any(len(states) for states in module.states)
    module.zero_grad()
    assert_same_gradients(*train(module, singles(module)))
    module.zero_grad()
    other = recipe_of(SECTIONS[0])
    linears = singles(module)
    with autocast(recipe=other):
        assert_same_gradients(*train(module, linears, context=lambda step: nullcontext()))
    assert module.quantizers.input == HybridQuantizer.parse("nvfp4|mxfp8")


@pytest.mark.feature("F83")
def test_histories_are_those_of_each_expert():
    """One history for all would see the largest expert only, and would be in the state_dict once."""
    module = grouped("fp8_delayed")
    linears = singles(module)
    assert_same_gradients(*train(module, linears, steps=3))
    for states, linear in zip(module.states, linears, strict=True):
        assert set(states) == set(linear.states) and len(states) == 6
        for name in states:
            assert torch.equal(states[name].history, linear.states[name].history)
            assert torch.equal(states[name].amax, linear.states[name].amax)
    histories = [module.states[e]["grad_output_rowwise"].history[:2].tolist() for e in range(EXPERTS)]
    assert histories[1] == [0, 0] and len({tuple(h) for h in histories}) == EXPERTS
    fresh = grouped("fp8_delayed")
    fresh.load_state_dict(module.state_dict())
    x = draw("normal", ROWS, K)
    with quantization(step=4), torch.no_grad():
        assert torch.equal(fresh(x, SPLITS), module(x, SPLITS))


def test_frozen_weights_and_inputs():
    module = grouped("mxfp8", bias=True)
    module.weight1.requires_grad_(False)
    module.weight3.requires_grad_(False)
    x = draw("normal", ROWS, K).view(2, 64, K)
    y = module(x, SPLITS)
    assert y.shape == (2, 64, N)
    y.float().sum().backward()
    assert module.weight0.grad is not None and module.weight3.grad is None and x.grad is None


def test_native_gives_codes_to_the_tensor_cores_for_all_three_gemms(monkeypatch):
    """For each expert that has tokens; here the exact product stands in for theirs."""
    seen = []

    def product(a, b, *, out_dtype):
        seen.append((str(a.format), str(b.format), a.shape[0]))
        return mm_t(a, b, out_dtype=out_dtype)

    monkeypatch.setattr("hqsweep.gemm.native.mm_t_native", product)
    fp8 = LINEARS["fp8_current"]
    module = GroupedLinear(EXPERTS, K, N, name="experts", recipe=recipe_of(fp8, gemm="native"))
    assert module.quantization_alignment == 16
    assert_same_gradients(*train(module, singles(module), steps=1))
    tokens = [m for m in SPLITS if m]
    expected = [("fp8_current", "fp8_current", m) for m in tokens]
    expected += [("fp8_current+e5m2", "fp8_current", m) for m in tokens + [N] * len(tokens)]
    assert seen == expected


def test_native_is_refused_where_there_are_no_tensor_cores():
    module = GroupedLinear(EXPERTS, K, N, name="experts", recipe=recipe_of("fp8_current", gemm="native"))
    with pytest.raises(UserError, match="experts: fp8_current x fp8_current: gemm=native needs a GPU"):
        module(draw("normal", ROWS, K), SPLITS)


def test_plans_of_a_module_depend_on_what_its_weights_are():
    module, format = grouped("mxfp8"), parse("mxfp8")
    for gemm in ("fprop", "dgrad", "wgrad"):
        plan = module.plan(gemm, format, format, torch.device("cpu"), "exact")
        assert str(plan) == "exact: bf16 operands, float32 GEMM, for each expert"
    module, device = grouped("mxfp8", plan_capability=GPU), torch.device("cpu")
    plans = [module.plan(gemm, format, format, device, "exact") for gemm in ("fprop", "dgrad", "wgrad")]
    assert [plan.one_kernel for plan in plans] == [True, True, False]
    assert module.to(torch.bfloat16).plan("wgrad", format, format, device, "exact").one_kernel


@pytest.mark.feature("T17")
@pytest.mark.gpu
@pytest.mark.parametrize("quantizers", ["bf16", "mxfp8", SECTIONS[1], SECTIONS[2]], ids=ids)
def test_splits_of_a_device_are_those_of_the_host(quantizers):
    """Gradients of weights may come by a plan that rounds them to bfloat16; all else has the same bytes."""
    module, runs = grouped(quantizers, bias=True).cuda(), []
    for splits in (list(SPLITS), torch.tensor(SPLITS, device="cuda"), torch.tensor(SPLITS)):
        module.zero_grad()
        x = draw("normal", ROWS, K).cuda().requires_grad_()
        with quantization(seed=1, step=1):
            y = module(x, splits)
        y.backward(torch.round(draw("normal", ROWS, N, 1) * 8).cuda())  # whole numbers: sums in any order are equal
        runs.append((y.detach(), x.grad, [w.grad for w in module.weights], [b.grad for b in module.biases]))
    for y, dx, dw, db in runs[1:]:
        assert torch.equal(y, runs[0][0]) and torch.equal(dx, runs[0][1])
        assert all(map(torch.equal, db, runs[0][3]))
        for own, expected in zip(dw, runs[0][2], strict=True):
            torch.testing.assert_close(own, expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("quantizers", ["bf16", "fp8_current", "mxfp8", "nvfp4", SECTIONS[1]], ids=ids)
@pytest.mark.parametrize("splits", [SPLITS, (ROWS // EXPERTS,) * EXPERTS], ids=["ragged", "equal"])
def test_a_gpu_computes_what_a_cpu_does(quantizers, splits):
    """On the plan of the device, but for the order of sums and a rounding to bfloat16."""
    runs = []
    for device in ("cpu", "cuda"):
        module, x = grouped(quantizers, bias=True).to(device), draw("normal", ROWS, K).to(device).requires_grad_()
        y = module(x, splits)
        y.backward(draw("normal", ROWS, N, 1).to(device))
        runs.append([t.float().cpu() for t in (y.detach(), x.grad, *(p.grad for p in module.parameters()))])
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=2**-6, atol=2**-6 * float(ours.abs().max()))
