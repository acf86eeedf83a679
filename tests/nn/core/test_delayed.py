"""Modules in fp8_delayed: which states they hold, when these change, and that a checkpoint carries them."""

import pickle

import pytest
import torch
from cases import DELAYED_IN_PARTS, LINEARS
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils.checkpoint import checkpoint

from hqsweep.errors import UserError
from hqsweep.formats import parse
from hqsweep.formats.inputs import draw
from hqsweep.gemm.exact import mm_t
from hqsweep.nn import (
    GroupedLinear,
    Linear,
    LinearOptions,
    Probe,
    autocast,
    quantization,
    quantized_model_init,
    set_recipe,
)
from hqsweep.nn.dot_product_attention import DotProductAttention
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import DpaQuantizers, QuantizerRole, Recipe

DELAYED = LINEARS["fp8_delayed"]
HYBRID = DELAYED_IN_PARTS
NAMES = [f"{t}_{d}" for t in ("input", "weight", "grad_output") for d in ("rowwise", "columnwise")]


def build(quantizers=DELAYED, **options):
    torch.manual_seed(0)
    return Linear(64, 96, name="fc", recipe=quantizers, options=LinearOptions(**options))


def recipe(linear=DELAYED, **sections):
    return Recipe.from_config({"linear": linear, **sections})


def train(module, step, *, scale=1.0, seed=0, call=None):
    """One microbatch of a step: y, dx and dw."""
    x = (draw("normal", 32, 64, seed) * scale).requires_grad_()
    module.weight.grad = None
    with quantization(step=step):
        y = (call or module)(x)
        y.backward(draw("normal", 32, 96, seed + 1) * scale)
    return y.detach(), x.grad, module.weight.grad


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items() if "states." in name}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def all_equal(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.feature("F17", "T2")
@pytest.mark.parametrize("quantizers", [DELAYED, HYBRID], ids=["both directions", "hybrid"])
def test_each_gemm_reads_operands_under_the_amaxes_of_the_step_before(quantizers):
    module = build(quantizers)
    train(module, 1, scale=2.0)
    y, dx, dw = train(module, 2)
    w, x, dy = module.weight.detach().bfloat16(), draw("normal", 32, 64), draw("normal", 32, 96, 1)
    before = {"input": 2 * x, "weight": w, "grad_output": 2 * dy}

    def operand(tensor, direction, matrix):
        format = getattr(getattr(module.quantizers, tensor), direction)
        grid = {"s": before[tensor].float().abs().max().view(1, 1)} if format.name == "fp8_delayed" else None
        return format.operand(format.encode(matrix, grid), tuple(matrix.shape))

    pairs = {
        "y": (y, ("input", "rowwise", x), ("weight", "rowwise", w)),
        "dx": (dx, ("grad_output", "rowwise", dy), ("weight", "columnwise", w.t())),
        "dw": (dw, ("grad_output", "columnwise", dy.t()), ("input", "columnwise", x.t())),
    }
    for name, (actual, a, b) in pairs.items():
        assert torch.equal(actual, mm_t(operand(*a), operand(*b), out_dtype=actual.dtype)), name


@pytest.mark.feature("F17", "T2")
def test_a_state_for_each_direction_in_the_format():
    module = build(HYBRID)
    assert set(module.states) == {"input_rowwise", "weight_columnwise", "grad_output_rowwise"}
    assert all(state.step is None and not state.history.any() for state in module.states.values())
    train(module, 1)
    assert set(module.states) == {"input_rowwise", "weight_columnwise", "grad_output_rowwise"}
    assert all(state.step == 1 and state.history[0] > 0 for state in module.states.values())


@pytest.mark.gpu
@pytest.mark.parametrize("held", [False, True])
def test_nothing_waits_for_the_gpu(held):
    with quantized_model_init(enabled=held):
        module = build(HYBRID).cuda()
    x, dy = draw("normal", 32, 64).cuda().requires_grad_(), draw("normal", 32, 96, 1).cuda()
    for step in (1, 2, 3):
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            with quantization(step=step):
                y = module(x)
            y.backward(dy)
            if held:
                update(module.weight, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert {state.step for state in module.states.values()} <= {3, None}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", [{}, {"save_original_input": True}], ids=str)
def test_recomputation_gives_the_same_bits_and_the_same_states(reentrant, options):
    plain, recomputed = build(**options), build(**options)
    for step in (1, 2, 3):
        for seed in (0, 5):  # two microbatches
            expected = train(plain, step, scale=step, seed=seed)
            actual = train(
                recomputed, step, scale=step, seed=seed,
                call=lambda x: checkpoint(recomputed, x, use_reentrant=reentrant),
            )  # fmt: skip
            assert all_equal(expected, actual)
    assert same(snapshot(plain), snapshot(recomputed))


def test_microbatches_share_a_scale():
    module = build()
    train(module, 1, scale=3.0)
    once = train(module, 2)
    train(module, 2, scale=100.0)
    assert all_equal(once, train(module, 2))
    assert not all_equal(once, train(module, 3))


@pytest.mark.parametrize("cached", [False, True])
def test_evaluation_changes_nothing_and_has_the_scales_of_its_step(cached):
    module = build()
    train(module, 1, scale=4.0)
    before, x = snapshot(module), draw("normal", 32, 64)
    outputs = {}
    with torch.no_grad():
        for step in (1, 2, 3):
            with quantization(step=step, cache_weights=cached):
                outputs[step] = module(x)
        outputs[None] = module(x)
    assert same(before, snapshot(module))
    assert torch.equal(outputs[2], train(module, 2)[0])
    assert torch.equal(outputs[2], outputs[3]) and torch.equal(outputs[2], outputs[None])
    assert not torch.equal(outputs[1], outputs[2])


def test_training_needs_a_step():
    with pytest.raises(UserError, match=r"fp8_delayed counts the steps of a training.*nn.quantization\(step=...\)"):
        build()(draw("normal", 32, 64))


def test_a_probe_sees_the_scales_in_use_and_changes_nothing():
    plain, probed, probe = build(HYBRID), build(HYBRID), Probe(step=2)
    for module in (plain, probed):
        train(module, 1, scale=2.0)
    expected, x = train(plain, 2), draw("normal", 32, 64).requires_grad_()
    probed.weight.grad = None
    with quantization(step=2, probe=probe):
        y = probed(x)
    y.backward(draw("normal", 32, 96, 1))
    assert all_equal(expected, (y.detach(), x.grad, probed.weight.grad)) and same(snapshot(plain), snapshot(probed))
    seen = {(row["tensor"], row["direction"]): row for row in probe.rows}
    amax = {"input": 2 * draw("normal", 32, 64), "grad_output": 2 * draw("normal", 32, 96, 1)}
    for tensor, top in (("input", 448), ("grad_output", 57344)):
        assert seen[tensor, "rowwise"]["scale_max"] == pytest.approx(float(amax[tensor].abs().max()) / top)


@pytest.mark.feature("F17", "T2")
def test_histories_live_through_a_change_that_keeps_the_slot():
    module = build()
    train(module, 1)
    before = snapshot(module)
    new = {"input": "fp8_delayed+e5m2+most_recent|mxfp8", "weight": "fp8_delayed+history8", "grad_output": "bf16"}
    assert set_recipe(module, recipe(new)) == 3
    assert set(module.states) == {"input_rowwise", "weight_rowwise", "weight_columnwise"}
    histories = snapshot(module)
    assert all(torch.equal(histories[name], before[name]) for name in histories if "input" in name)
    for state in (module.states["weight_rowwise"], module.states["weight_columnwise"]):
        assert len(state.history) == 8 and state.step is None  # another length is another history
    train(module, 2)
    assert set(module.states) == {"input_rowwise", "weight_rowwise", "weight_columnwise"}
    set_recipe(module, recipe("bf16"))
    assert not module.states


def test_under_autocast_states_are_made_and_left_alone_by_other_recipes():
    module, x = build("bf16"), draw("normal", 32, 64)
    with autocast(recipe=recipe()):
        train(module, 1)
    before = snapshot(module)
    assert set(module.states) == set(NAMES)
    with autocast(enabled=False):
        train(module, 2)
    module(x)
    assert same(before, snapshot(module))
    own = build()
    train(own, 1)
    with autocast(recipe=recipe()):
        assert all_equal(train(module, 2), train(own, 2))


@pytest.mark.parametrize("own", [DELAYED, "bf16"], ids=["own recipe", "autocast"])
def test_a_checkpoint_goes_on_in_a_fresh_module(own):
    module = build(own)
    with autocast(recipe=recipe()):
        train(module, 1, scale=3.0)
        train(module, 2)
    fresh = build(own)
    fresh.load_state_dict(module.state_dict())
    assert same(snapshot(fresh), snapshot(module)) and {s.step for s in fresh.states.values()} == {2}
    copy = pickle.loads(pickle.dumps(module))
    with autocast(recipe=recipe()):
        expected = train(module, 2)
        assert all_equal(expected, train(fresh, 2)) and all_equal(expected, train(copy, 2))
    fresh.load_state_dict(build("bf16").state_dict())  # a checkpoint without states
    assert all(s.step is None and not s.history.any() and not s.amax for s in fresh.states.values())


GROUPED = {"num_experts": 2, "in_features": 64, "out_features": 96, "name": "fc"}


def model(own, seed):
    """A linear and two experts in a recipe of their own, or in bf16 for an autocast."""
    torch.manual_seed(seed)
    linear = Linear(64, 64, name="l", recipe=own)
    return nn.Sequential(linear, GroupedLinear(**GROUPED, recipe=recipe(own)))


def step_of(model, step):
    with quantization(step=step):
        y = model[1](model[0](draw("normal", 32, 64, step) * step), [8, 24])
        y.backward(draw("normal", 32, 96, step))
    return y.detach()


def save_and_load(trained, fresh, folder):
    """By torch.distributed.checkpoint, which fills in what a state_dict of the fresh model has."""
    dcp.save(get_model_state_dict(trained), checkpoint_id=folder, no_dist=True)
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(fresh, state)


@pytest.mark.feature("F134", "F167")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("own", [DELAYED, "bf16"], ids=["own recipe", "autocast"])
def test_a_distributed_checkpoint_goes_on_in_a_fresh_model(own, tmp_path):
    trained, fresh = model(own, 0), model(own, 1)
    with autocast(recipe=recipe()):
        step_of(trained, 1), step_of(trained, 2)
        save_and_load(trained, fresh, tmp_path)
        assert len(snapshot(fresh)) == 3 * 6 * 3 and same(snapshot(fresh), snapshot(trained))
        assert torch.equal(step_of(trained, 3), step_of(fresh, 3))
    assert same(snapshot(fresh), snapshot(trained))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_that_a_checkpoint_was_not_asked_for_is_told(tmp_path):
    trained, fresh = model("bf16", 0), model("bf16", 1)
    with autocast(recipe=recipe()):
        step_of(trained, 1)
    save_and_load(trained, fresh, tmp_path)
    expected = "a slot that is in use now, which begins anew;.*inside that autocast"
    with pytest.warns(UserWarning, match=expected), autocast(recipe=recipe()):
        step_of(fresh, 2)


@pytest.mark.feature("F22")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_move_to_another_dtype_leaves_histories_in_float32(dtype):
    module, moved = build(), build()
    for each in (module, moved):
        train(each, 1)
    moved.to(dtype)
    assert same(snapshot(module), snapshot(moved))
    assert {buffer.dtype for buffer in moved.buffers()} == {torch.float32}


@pytest.mark.parametrize("assign", [False, True])
def test_histories_that_a_checkpoint_has_in_another_dtype_become_float32(assign):
    """As where somebody has converted every tensor of a file."""
    module, fresh = build(), build()
    train(module, 1)
    cast = {key: t.bfloat16() if t.is_floating_point() else t for key, t in module.state_dict().items()}
    fresh.load_state_dict(cast, assign=assign)
    assert {buffer.dtype for buffer in fresh.buffers()} == {torch.float32}
    assert all(torch.equal(b, cast[name].float()) for name, b in fresh.named_buffers())
    for each in (module, fresh):
        train(each, 2)
    assert {s.history.dtype for s in fresh.states.values()} == {torch.float32}
    assert all(torch.equal(s.history[0], fresh.states[n].history[0]) for n, s in module.states.items())


def test_histories_are_float32_under_another_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = build()
        with autocast(recipe=recipe(HYBRID)), quantization(step=1):
            module(draw("normal", 32, 64).bfloat16()).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {buffer.dtype for buffer in module.buffers()} == {torch.float32}


def test_what_comes_from_the_meta_device_begins_anew():
    with torch.device("meta"):
        module = build()
    assert all(buffer.is_meta for buffer in module.buffers())
    module.to_empty(device="cpu")
    assert len(list(module.buffers())) == 12 and not any(buffer.any() for buffer in module.buffers())


def test_attention_trains_in_the_formats_of_fp8_attention():
    texts = {"qkv": "fp8_current", "s": "fp8_delayed+most_recent+history1", "do": "fp8_current+e5m2"}
    quantizers = {t: HybridQuantizer.parse(text) for t, text in texts.items()}
    quantizers["dp"] = HybridQuantizer.parse("fp8_delayed+e5m2+most_recent+history1")
    attention = DotProductAttention(name="dpa", recipe=DpaQuantizers(**quantizers))
    q = draw("normal", 32, 16).view(1, 32, 16).requires_grad_()
    exact = torch.nn.functional.scaled_dot_product_attention(*[q.detach().float()] * 3, is_causal=True)
    outputs = []
    for step in (1, 2):
        with quantization(step=step):
            o = attention(q, q, q, is_causal=True)
        (gradient,) = torch.autograd.grad(o, q, draw("normal", 32, 16, 1).view(1, 32, 16))
        assert (o.detach() - exact).norm() < 0.05 * exact.norm() and gradient.isfinite().all()
        outputs.append(o.detach())
    assert set(attention.states) == {f"{t}_{d}" for t in ("s", "dp") for d in ("rowwise", "columnwise")}
    assert attention.states["s_rowwise"].amax == 1  # softmax of the first position
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("boundary", ["output", "grad_input"])
def test_a_boundary_is_a_slot_like_others(boundary):
    module = build("bf16")
    setattr(module, f"{boundary}_quantizer_role", QuantizerRole("linear", "input", "next"))
    set_recipe(module, recipe("bf16", overrides=[{"name": "next", "linear": "fp8_delayed"}]))
    plain = build("bf16")
    values = {"output": 0, "grad_input": 1}[boundary]
    for step, scale in ((1, 2.0), (2, 1.0)):
        unrounded, actual = train(plain, step, scale=scale)[values], train(module, step, scale=scale)[values]
        format, state = parse("fp8_delayed"), module.states[f"{boundary}_rowwise"]
        buffers = format.encode(unrounded, {"s": state.amax})
        assert torch.equal(actual, format.decode(buffers, tuple(actual.shape)).to(actual.dtype))
    assert state.amax > 0 and state.step == 2


def update(weight, scale):
    """What an optimizer does: the weight times a factor, written from high precision."""
    with torch.no_grad():
        weight.quantize_(weight.dequantize() * scale)


def test_a_held_weight_is_written_under_the_amax_of_the_values_that_steps_used():
    with quantized_model_init():
        module = build({"input": "bf16", "weight": "fp8_delayed+history2", "grad_output": "bf16"})
    weight, state = module.weight, module.states["weight_rowwise"]
    assert weight.states.states["rowwise"] is state and state.step is None and state.amax == 0
    first = state.history[0].clone()
    with torch.no_grad():
        weight.mul_(0.5)  # before any step: the values before are forgotten
    assert state.history[0] <= 0.6 * first and state.amax == 0
    used = state.history[0].clone()
    train(module, 1)
    assert state.step == 1
    with torch.no_grad(), quantization(step=9):
        module(draw("normal", 32, 64))
    assert state.step == 1  # an evaluation uses it for no step
    update(weight, 2.0)
    assert state.amax == used and state.step is None and weight.rowwise.buffers["s"] == used / 448
    assert weight.dequantize().abs().max() == used.bfloat16()  # it saturates, as delayed scaling does
    update(weight, 1.0)
    assert state.amax == used  # no step between


def test_a_held_weight_finds_the_states_of_its_module_again():
    recipe_of = {"input": "bf16", "weight": "fp8_delayed", "grad_output": "bf16"}
    with quantized_model_init():
        module, other = build(recipe_of), build(recipe_of)
        with torch.device("meta"):
            later = build(recipe_of)
    train(module, 1)
    update(module.weight, 1.0)
    other.load_state_dict(module.state_dict())
    copy = pickle.loads(pickle.dumps(module))
    for again in (other, copy):
        assert all_equal(train(again, 2), train(module, 2))
        update(again.weight, 1.5)
        assert same(snapshot(again), snapshot(other))
    later.to_empty(device="cpu")
    torch.manual_seed(0)
    later.reset_parameters()
    assert later.states["weight_columnwise"].amax == 0
    train(later, 1)
    update(later.weight, 1.0)
    assert later.states["weight_rowwise"].amax > 0
    with pytest.raises(UserError, match="fp8_delayed takes its scale from"):
        update(module.weight.clone(), 1.0)
