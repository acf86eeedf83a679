"""autocast's former name, recomputation, availability, and padding of experts' rows."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hqsweep import compat
from hqsweep.compat import CustomRecipe, Fp8Padding, Fp8Unpadding, autocast, fp8_autocast
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import quantization

AVAILABLE = ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4", "bf16")


def test_fp8_autocast_is_autocast_by_its_former_arguments():
    module, x = compat.Linear(64, 96), draw("normal", 32, 64)
    with fp8_autocast(True, fp8_recipe="mxfp8"):
        old = module(x)
    with autocast(recipe="mxfp8"):
        new = module(x)
    with fp8_autocast(enabled=False):
        plain = module(x)
    assert torch.equal(old, new) and not torch.equal(old, plain)
    with pytest.raises(UserError, match="calibrating=True has no counterpart"):
        fp8_autocast(True, True, "mxfp8")
    with pytest.raises(UserError, match=r"amax_reduction_group=3 is given to hqsweep.nn.quantization\(amax_group="):
        autocast(recipe="mxfp8", amax_reduction_group=3)


def test_fp8_model_init_holds_weights():
    with compat.fp8_model_init(recipe="mxfp8"):
        assert isinstance(compat.Linear(64, 96).weight, compat.MXFP8Tensor)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "nvfp4|mxfp8"])
def test_masters_are_written_and_processed_by_their_arguments(recipe):
    with compat.quantized_model_init(recipe={"input": recipe, "weight": recipe, "grad_output": "bf16"}):
        weight, other = compat.Linear(64, 96).weight, compat.Linear(64, 96).weight
    master = draw("normal", 96, 64).float()
    compat.quantize_master_weights([weight], [master.view(-1)], [0], None)
    compat.post_all_gather_processing([weight])
    assert torch.equal(
        weight.dequantize(), compat.HybridQuantizedTensor.quantize(master, weight.quantizer).dequantize()
    )
    compat.quantize_master_weights([weight], [2 * master.view(-1)], [0], None, [other])
    assert other.dequantize().abs().amax() > 1.5 * weight.dequantize().abs().amax()
    compat.replace_raw_data(weight, torch.empty(weight._rowwise_data.nbytes, dtype=torch.uint8))
    if recipe == "nvfp4|mxfp8":
        with pytest.raises(UserError, match="does not follow from its rowwise codes"):
            compat.post_all_gather_processing([weight])


def test_masters_of_a_weight_without_operands_are_refused():
    with compat.quantized_model_init(recipe="mxfp8"):
        weight = compat.Linear(64, 96).weight
    weight.update_usage(rowwise_usage=False, columnwise_usage=False)
    with pytest.raises(UserError, match=r"a weight \[96, 64\] in mxfp8 has dropped both rowwise and columnwise"):
        compat.quantize_master_weights([weight], [torch.zeros(96 * 64)], [0], None)


@pytest.mark.parametrize("name", AVAILABLE)
def test_every_format_is_available(name):
    asked = getattr(compat, f"is_{name}_available")
    assert asked() is True and asked(return_reason=True) == (True, "")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_computes_again_with_the_same_bits(reentrant):
    """Stochastic rounding, dropout, and an autocast that ends before backward."""
    module, dropout = compat.LayerNormMLP(64, 96, params_dtype=torch.bfloat16, name="m"), nn.Dropout(0.5)
    results = []
    for recompute in (False, True):
        x, calls = draw("normal", 32, 64).requires_grad_(), []

        def block(x, scale, calls=calls):
            calls.append(1)
            return dropout(module(x)) * scale

        torch.manual_seed(3)
        module.zero_grad()
        with quantization(seed=1, step=4), autocast(recipe=compat.NVFP4BlockScaling()):
            if recompute:
                y = compat.checkpoint(block, x, scale=2.0, use_reentrant=reentrant, tp_group=None)
            else:
                y = block(x, 2.0)
        y.backward(draw("normal", 32, 64, 1))
        assert len(calls) == 1 + recompute
        results.append((y.detach(), x.grad, *(p.grad for p in module.parameters())))
    assert all(torch.equal(plain, again) for plain, again in zip(*results, strict=True))


def test_checkpoint_refuses_what_it_would_not_do():
    with pytest.raises(UserError, match="checkpoint: distribute_saved_activations=True has no counterpart"):
        compat.checkpoint(torch.relu, torch.ones(2), distribute_saved_activations=True)
    with pytest.raises(UserError, match=r"checkpoint: get_rng_state_tracker=.* has no counterpart"):
        compat.checkpoint(torch.relu, torch.ones(2), get_rng_state_tracker=lambda: None)


def test_padding_adds_rows_of_zeros_and_unpadding_takes_them_off():
    x = draw("normal", 12, 8).float().requires_grad_()
    padded, splits = Fp8Padding(3, align_size=8)(x, [3, 0, 9])
    assert splits == [8, 0, 16] and padded.shape == (24, 8)
    assert torch.equal(padded[:3], x[:3]) and torch.equal(padded[8:17], x[3:])
    assert not padded[3:8].any() and not padded[17:].any()
    again = Fp8Unpadding(3, 8)(padded, [3, 0, 9])
    assert torch.equal(again, x)
    again.square().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    whole = draw("normal", 16, 8)
    assert Fp8Padding(2, 8)(whole, [8, 8])[0] is whole and Fp8Unpadding(2, 8)(whole, [8, 8]) is whole


@pytest.mark.parametrize(
    ("recipe", "multiple"),
    [
        (compat.MXFP8BlockScaling(), 32), (compat.NVFP4BlockScaling(), 128), (compat.Float8CurrentScaling(), 16),
        (CustomRecipe(compat.mxfp8_factory), 128), (CustomRecipe(compat.mxfp8_factory, quantization_alignment=32), 32),
    ],
)  # fmt: skip
def test_padding_takes_the_multiple_of_the_recipe(recipe, multiple):
    with autocast(recipe=recipe):
        assert Fp8Padding(2)(torch.ones(5, 4), [4, 1])[1] == [multiple, multiple]


def test_padding_refuses_other_splits_and_no_multiple():
    with pytest.raises(UserError, match="Fp8Padding: 1 splits for 2 members"):
        Fp8Padding(2, 8)(torch.ones(4, 4), [4])
    with pytest.raises(UserError, match="no autocast says to which multiple; give align_size"):
        Fp8Padding(1)(torch.ones(4, 4), [4])


@pytest.mark.parametrize("held", [False, True])
def test_each_outermost_autocast_is_a_step_of_delayed_scaling(held):
    """As quantization(step=) counts them, to the bit; an inner autocast belongs to the outer one's step."""
    recipe, results = compat.DelayedScaling(amax_history_len=2), []
    for counted in (True, False):
        torch.manual_seed(0)
        with compat.quantized_model_init(enabled=held, recipe=recipe):
            module = compat.Linear(64, 64, name="l")
        outputs = []
        for step in range(3):
            x = (draw("normal", 32, 64, step) * 4.0**step).requires_grad_()
            outer = quantization(step=step) if counted else nullcontext()
            with outer, autocast(recipe=recipe), autocast(recipe=recipe):
                y = module(x)
            y.sum().backward()
            outputs += [y.detach(), x.grad]
        results.append(outputs)
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][2], results[0][4])


def test_a_loaded_history_goes_on_in_the_next_step():
    recipe, x = compat.DelayedScaling(amax_history_len=4), draw("normal", 32, 64)
    first, second = (compat.Linear(64, 64, name="l", init_method=torch.nn.init.ones_) for _ in range(2))
    with autocast(recipe=recipe):
        first(x)
    with autocast(recipe=recipe):
        second.load_state_dict(first.state_dict())
    outputs = []
    for module in (first, second):
        with autocast(recipe=recipe):
            outputs.append(module(x * 8))
    assert torch.equal(*outputs)
