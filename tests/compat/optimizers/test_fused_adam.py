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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "FusedAdam: amsgrad=True has no counterpart"),
        ({"bias_correction": False}, "FusedAdam: bias_correction=False has no counterpart"),
        ({"use_decoupled_grad": True}, "use_decoupled_grad=True has no counterpart"),
        ({"exp_avg_dtype": torch.bfloat16}, "exp_avg_dtype is torch.bfloat16; it takes torch.float32"),
        ({"exp_avg_sq_dtype": torch.uint8}, "exp_avg_sq_dtype is torch.uint8"),
        ({"master_weight_dtype": torch.float16}, "master_weight_dtype is torch.float16"),
        (
            {"adam_w_mode": False, "weight_decay": 0.1},
            "adam_w_mode=False with weight_decay=0.1 adds decay",
        ),
    ],
)
def test_what_would_change_a_number_and_is_not_here_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        FusedAdam([parameter()], **options)


def test_a_copy_keeps_the_options():
    twin = copy.deepcopy(FusedAdam([parameter()], adam_w_mode=False))
    with pytest.raises(UserError, match=r"adam_w_mode=False with weight_decay=0.5"):
        twin.add_param_group({"params": [parameter()], "weight_decay": 0.5})


def test_low_precision_needs_masters():
    with pytest.raises(UserError, match=r"1 parameters are torch.bfloat16, .* give master_weights=True"):
        FusedAdam([parameter(torch.bfloat16)])
