"""FusedAdam by TransformerEngine's arguments is AdamW with its defaults; other options are refused."""

import copy
import inspect

import pytest
import torch
from torch import nn

from hqsweep import compat
from hqsweep.compat import FusedAdam
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw


def parameter(dtype=torch.float32):
    return nn.Parameter(draw("normal", 16, 32).to(dtype))


def trained(optimizer, weight):
    for step in range(3):
        weight.grad = draw("normal", 16, 32, step).to(weight.dtype)
        optimizer.step()
    return weight.detach()


def test_defaults_are_theirs():
    shown = [(p.name, p.default) for p in inspect.signature(FusedAdam).parameters.values()][1:]
    assert [default for _, default in shown[:5]] == [1e-3, (0.9, 0.999), 1e-8, 0.0, False]
    assert dict(shown)["master_weights"] is False and dict(shown)["adam_w_mode"] is True


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"adam_w_mode": False}, {"capturable": True}])
def test_float32_parameters_train_as_by_adamw_without_decay(options):
    ours, theirs = parameter(), parameter()
    expected = torch.optim.AdamW([theirs], weight_decay=options.get("weight_decay", 0.0))
    torch.testing.assert_close(trained(FusedAdam([ours], **options), ours), trained(expected, theirs))


@pytest.mark.parametrize("held", [False, True])
def test_masters_are_float32_and_rounded_into_the_parameter(held):
    with compat.quantized_model_init(enabled=held, recipe="mxfp8"):
        weight = compat.Linear(32, 64, bias=False, params_dtype=torch.bfloat16).weight
    whole = nn.Parameter((weight.dequantize() if held else weight).detach().float())
    optimizer, plain = FusedAdam([weight], master_weights=True), torch.optim.AdamW([whole], weight_decay=0.0)
    weight.grad = draw("normal", 64, 32)
    whole.grad = weight.grad.float()
    with pytest.raises(UserError, match=r"a parameter \[64, 32\] has no exp_avg; its first step makes it"):
        optimizer.get_unscaled_state(weight, "exp_avg")
    optimizer.step()
    plain.step()
    master = optimizer.get_unscaled_state(weight, "master_param")
    torch.testing.assert_close(master, whole.detach())
    assert held or torch.equal(weight.detach(), master.bfloat16())
    optimizer.set_scaled_state(weight, "exp_avg", torch.ones(64, 32))
    assert torch.equal(optimizer.get_unscaled_state(weight, "exp_avg"), torch.ones(64, 32))
    with pytest.raises(UserError, match="state_name is 'step'; it takes exp_avg or exp_avg_sq or master_param"):
        optimizer.get_unscaled_state(weight, "step")


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8]
FAR = {torch.float32: 0, torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.uint8: 7e-2}
"""dtype of a state -> its relative distance from float32 after a step."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_are_kept_in_the_dtypes_that_are_asked_for(dtype):
    ours, theirs = parameter(), parameter()
    optimizer = FusedAdam([ours], exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    plain = torch.optim.AdamW([theirs], weight_decay=0.0)
    trained(optimizer, ours)
    trained(plain, theirs)
    for name in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[ours][name].dtype is dtype
        own, expected = optimizer.get_unscaled_state(ours, name), plain.state[theirs][name]
        assert own.dtype is torch.float32 and (own - expected).norm() <= 2 * FAR[dtype] * expected.norm()
    twin = FusedAdam([ours], exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    twin.load_state_dict(optimizer.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        own, saved = twin.get_unscaled_state(ours, name), optimizer.state_dict()["state"][0][name]
        assert saved.dtype is torch.float32 and twin.state[ours][name].dtype is dtype
        assert (own - saved).norm() <= FAR[dtype] * saved.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_without_masters_is_updated_in_float32(dtype):
    """As by AdamW on the parameter in float32, which is rounded after each step; moments are float32."""
    ours = parameter(dtype)
    optimizer, whole = FusedAdam([ours]), nn.Parameter(ours.detach().float())
    plain = torch.optim.AdamW([whole], weight_decay=0.0)
    for step in range(3):
        ours.grad = draw("normal", 16, 32, step).to(dtype)
        whole.grad = ours.grad.float()
        optimizer.step()
        plain.step()
        with torch.no_grad():
            whole.copy_(whole.to(dtype))
        assert torch.equal(ours.detach(), whole.to(dtype))
    assert optimizer.state[ours]["exp_avg"].dtype is torch.float32 and "master_param" not in optimizer.state[ours]


def test_masters_in_float16_have_a_scale():
    ours, whole = parameter(torch.bfloat16), nn.Parameter(parameter(torch.bfloat16).detach().float())
    optimizer = FusedAdam([ours], master_weights=True, master_weight_dtype=torch.float16)
    trained(optimizer, ours)
    trained(torch.optim.AdamW([whole], weight_decay=0.0), whole)
    master = optimizer.get_unscaled_state(ours, "master_param")
    torch.testing.assert_close(master, whole.detach(), rtol=2e-3, atol=2e-3)
    assert torch.equal(ours.detach(), master.bfloat16()) or (ours - master).abs().max() < 1e-2


def test_decay_may_be_added_to_gradients():
    ours, theirs = parameter(), parameter()
    expected = trained(torch.optim.Adam([theirs], weight_decay=0.1), theirs)
    optimizer = FusedAdam([ours], weight_decay=0.1, adam_w_mode=False)
    torch.testing.assert_close(trained(optimizer, ours), expected)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_biases_of_moments_may_stay():
    ours = parameter()
    expected, average, square = ours.detach().clone(), torch.zeros(16, 32), torch.zeros(16, 32)
    for step in range(3):
        g = draw("normal", 16, 32, step).float()
        average, square = average * 0.9 + 0.1 * g, square * 0.999 + 0.001 * g * g
        expected -= 1e-3 * average / (square.sqrt() + 1e-8)
    optimizer = FusedAdam([ours], bias_correction=False)
    torch.testing.assert_close(trained(optimizer, ours), expected, rtol=1e-5, atol=1e-6)
    assert optimizer.state[ours]["step"].item() == 3


def test_gradients_may_be_decoupled():
    ours, theirs = parameter(torch.bfloat16), parameter(torch.bfloat16)
    optimizer, plain = FusedAdam([ours], use_decoupled_grad=True), FusedAdam([theirs])
    ours.decoupled_grad = draw("normal", 16, 32)
    theirs.main_grad = ours.decoupled_grad.clone()
    optimizer.step()
    plain.step()
    assert torch.equal(ours, theirs) and ours.grad is None
    optimizer.zero_grad(set_to_none=False)
    assert not ours.decoupled_grad.any()
    optimizer.zero_grad()
    assert ours.decoupled_grad is None


def test_groups_count_their_steps():
    optimizer = FusedAdam([{"params": [parameter()]}, {"params": []}])
    optimizer.step()
    optimizer.step()
    assert [group["step"] for group in optimizer.state_dict()["param_groups"]] == [2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "FusedAdam: amsgrad=True has no counterpart"),
        ({"exp_avg_dtype": torch.float64}, "exp_avg_dtype is torch.float64; it takes torch.float32 or torch.float16"),
        ({"exp_avg_sq_dtype": torch.int8}, "exp_avg_sq_dtype is torch.int8"),
        ({"master_weight_dtype": torch.bfloat16}, "master_weight_dtype is torch.bfloat16"),
    ],
)
def test_what_would_change_a_number_and_is_not_here_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        FusedAdam([parameter()], **options)


def test_a_copy_keeps_the_options_and_the_states():
    weight = parameter()
    optimizer = FusedAdam([weight], adam_w_mode=False, weight_decay=0.1, exp_avg_dtype=torch.float16)
    trained(optimizer, weight)
    twin_weight, twin = copy.deepcopy((weight, optimizer))
    trained(optimizer, weight)
    assert torch.equal(trained(twin, twin_weight), weight)


def test_held_weights_need_masters():
    with compat.quantized_model_init(recipe="mxfp8"):
        weight = compat.Linear(32, 64, bias=False).weight
    with pytest.raises(UserError, match=r"1 parameters are quantized, such as one in mxfp8.* give master_weights=True"):
        FusedAdam([weight])
    with pytest.raises(RuntimeError, match="give master_weights=True"):  # as in TransformerEngine
        FusedAdam([weight], master_weights=[])
    assert FusedAdam([weight], master_weights=[weight]).keeps_masters


def test_a_scaler_leaves_float16_gradients_to_a_capturable_optimizer():
    start = draw("normal", 16, 32).half()
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    scaled = FusedAdam([weights[0]], master_weights=True, capturable=True)
    plain = FusedAdam([weights[1]], master_weights=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weights[1].grad = draw("normal", 16, 32, seed=1).half()
    weights[0].grad = scaler.scale(weights[1].grad)
    scaler.step(scaled)
    scaler.update()
    plain.step()
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], start)
    assert torch.equal(weights[0].grad, weights[1].grad)
    weights[0].grad[0, 0] = torch.inf
    scaler.step(scaled)
    scaler.update()
    assert torch.equal(weights[0], weights[1]) and scaler.get_scale() == 512
    with pytest.raises(UserError, match=r"FusedAdam.step: grad_scaler=a GradScaler has no counterpart here"):
        scaled.step(grad_scaler=scaler)
