"""Quantizers as objects: called, changed, copied, subclassed, with the bytes of the frozen ones underneath."""

import copy
import pickle

import pytest
import torch

from hqsweep import compat
from hqsweep.compat import CustomRecipe, DType, HybridQuantizer, IdentityQuantizer, MXFP8Quantizer, NVFP4Quantizer
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, set_recipe
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.quant import HybridQuantizer as Frozen

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
MAKE = {
    "fp8_current+e5m2+pow2": lambda: compat.Float8CurrentScalingQuantizer(E5M2, force_pow_2_scales=True),
    "fp8_block": lambda: compat.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "fp8_block+2d": lambda: compat.Float8BlockQuantizer(E4M3),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "mxfp8+2d": lambda: MXFP8Quantizer(E4M3, with_2d_quantization=True),
    "nvfp4+rht": lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "nvfp4+4over6+mse": lambda: NVFP4Quantizer(
        nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE"
    ),
    "bf16": IdentityQuantizer,
    "nvfp4|mxfp8@rowwise_dequantized": lambda: HybridQuantizer(
        rowwise_quantizer=NVFP4Quantizer(), columnwise_quantizer=MXFP8Quantizer(E4M3),
        columnwise_source="rowwise_dequantized",
    ),
}  # fmt: skip


def values():
    return draw("heavy", 64, 128)


def assert_same(tensor, text, x):
    theirs = Frozen.parse(text).quantize(x)
    for direction in tensor.metadata.directions:
        ours, other = getattr(tensor, direction).buffers, getattr(theirs, direction).buffers
        assert all(torch.equal(ours[name].contiguous(), other[name]) for name in other), direction


@pytest.mark.parametrize("text", MAKE)
def test_a_call_has_the_bytes_of_the_format(text):
    x, quantizer = values(), MAKE[text]()
    tensor = quantizer(x)
    assert tensor.shape == x.shape and tensor.dtype is x.dtype and tensor.get_usages() == quantizer.get_usages()
    assert_same(tensor, text, x)
    assert str(quantizer) == text and quantizer == Frozen.parse(text) == quantizer.frozen


@pytest.mark.parametrize("text", MAKE)
def test_usages_say_which_directions_a_call_makes(text):
    quantizer = MAKE[text]()
    quantizer.set_usage(rowwise=False)
    assert (quantizer.rowwise_usage, quantizer.columnwise_usage) == (False, True)
    tensor = quantizer(values())
    assert tensor.metadata.directions == ("columnwise",)
    assert_same(tensor, text, values())
    quantizer.set_usage(rowwise=True, columnwise=False)
    assert quantizer(values()).metadata.directions == ("rowwise",)


@pytest.mark.parametrize("text", MAKE)
def test_update_quantized_and_out_write_what_a_call_makes(text):
    quantizer, x = MAKE[text](), values()
    tensor = quantizer.make_empty(x.shape, dtype=x.dtype, device="cpu")
    assert quantizer.update_quantized(x, tensor, noop_flag=torch.ones(1)) is tensor
    assert quantizer.quantize(x, out=tensor) is tensor
    assert_same(tensor, text, x)
    quantizer.update_quantized(2 * x, tensor, noop_flag=torch.ones(1))
    assert_same(tensor, text, x)
    quantizer.update_quantized(2 * x, tensor, noop_flag=torch.zeros(1))
    assert_same(tensor, text, 2 * x)


def test_update_quantized_refuses_a_tensor_of_other_formats():
    with pytest.raises(UserError, match="MXFP8Quantizer of mxfp8 cannot update a tensor in nvfp4"):
        MXFP8Quantizer(E4M3).update_quantized(values(), NVFP4Quantizer()(values()))
    with pytest.raises(UserError, match=r"dst is a Tensor \[64, 128\]; it takes a quantized tensor"):
        MXFP8Quantizer(E4M3).update_quantized(values(), values())


def test_gradients_pass_a_call_unchanged():
    x = values().float().requires_grad_()
    (MXFP8Quantizer(E4M3)(x).dequantize() * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))
    internal = MXFP8Quantizer(E4M3)
    internal.internal = True
    assert not internal(x).requires_grad


def test_an_assigned_attribute_is_followed_by_the_next_use():
    block = compat.Float8BlockQuantizer(E4M3)
    block.block_scaling_dim = 1
    assert_same(block(values()), "fp8_block", values())
    assert str(block) == "fp8_block"
    block.block_scaling_dim = 3
    with pytest.raises(UserError, match="block_scaling_dim is 3; it takes 1 or 2"):
        block(values())


def test_copies_are_apart_and_equal():
    quantizer = MAKE["nvfp4|mxfp8@rowwise_dequantized"]()
    for twin in (quantizer.copy(), copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer))):
        assert twin == quantizer and hash(twin) == hash(quantizer)
        twin.rowwise_quantizer.stochastic_rounding = True
        assert twin != quantizer and str(quantizer.rowwise) == "nvfp4"


def test_stochastic_rounding_of_a_call_follows_torch_s_seed():
    quantizer, codes = NVFP4Quantizer(stochastic_rounding=True), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        codes.append(quantizer(values()).rowwise.buffers["q"])
    assert torch.equal(codes[0], codes[1]) and not torch.equal(codes[0], codes[2])


def test_modules_and_recipes_take_a_quantizer_as_they_take_its_frozen_one():
    x, results = draw("normal", 32, 64), []
    for recipe in (MXFP8Quantizer(E4M3), "format:mxfp8"):
        torch.manual_seed(0)
        module = Linear(64, 96, name="fc", recipe=recipe)
        assert set_recipe(module, recipe) == 0
        results.append(module(x))
    with compat.autocast(recipe=MXFP8Quantizer(E4M3)):
        results.append(module(x))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


class Counting(IdentityQuantizer):
    """A user's quantizer, that halves what it is given."""

    calls = 0

    def quantize_impl(self, tensor):
        type(self).calls += 1
        return super().quantize_impl(tensor * 0.5)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_subclass_s_own_quantize_impl_makes_the_operands_of_modules(hybrid):
    def factory(role):
        if role is None or role.tensor_type != "input":
            return IdentityQuantizer()
        if hybrid:
            return HybridQuantizer(rowwise_quantizer=Counting(), columnwise_quantizer=Counting())
        return Counting()

    Counting.calls, x = 0, draw("normal", 32, 64).requires_grad_()
    module = compat.Linear(64, 96, bias=False, params_dtype=torch.bfloat16)
    with compat.autocast(recipe=CustomRecipe(qfactory=factory)):
        y = module(x)
    y.backward(dy := draw("normal", 32, 96, 1))
    half = x.detach() * 0.5
    assert torch.equal(y, half @ module.weight.t()) and torch.equal(module.weight.grad, dy.t() @ half)
    assert Counting.calls


def test_a_subclass_that_only_adds_is_the_format_itself():
    class Named(MXFP8Quantizer):
        def is_requantization_safe(self):
            return False

    assert Named(E4M3).is_plain and not Counting().is_plain and Named(E4M3) != Named(E4M3)
    assert type(Named(E4M3).quantizer(compat.QuantizerRole())) is Frozen


def test_a_subclass_without_a_format_is_called_but_is_no_slot():
    class Own(compat.Quantizer):
        def quantize_impl(self, tensor):
            return IdentityQuantizer(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)(tensor)

    own = Own(rowwise=True, columnwise=True)
    assert torch.equal(own(values()).dequantize(), values())
    hybrid = HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=own)
    assert torch.equal(hybrid(values()).columnwise.dequantize().t(), values())
    for quantizer in (own, hybrid):
        with pytest.raises(UserError, match="Own: a Quantizer of its own has no format here; derive it from Identity"):
            CustomRecipe(qfactory=lambda role, q=quantizer: q).quantizer(compat.QuantizerRole("linear", "input", "fc"))


def test_what_an_own_quantize_impl_must_return():
    class Wrong(MXFP8Quantizer):
        def quantize_impl(self, tensor):
            return tensor if self.rowwise_usage else MXFP8Quantizer(E4M3, columnwise=False)(tensor)

    frozen = Wrong(E4M3).quantizer(compat.QuantizerRole())
    with pytest.raises(UserError, match=r"Wrong: quantize\(\) returned a Tensor .*; it must return a quantized tensor"):
        frozen.quantize(values(), columnwise=None)
    with pytest.raises(UserError, match=r"Wrong: quantize\(\) made no columnwise operand"):
        frozen.quantize(values(), rowwise=None)

    class Random(NVFP4Quantizer):
        def quantize_impl(self, tensor):
            return super().quantize_impl(tensor)

    with pytest.raises(UserError, match=r"Random: nvfp4.sr rounds stochastically, and its own quantize_impl"):
        Random(stochastic_rounding=True).quantizer(compat.QuantizerRole())


def test_multi_quantize_and_dtype():
    one, two = MXFP8Quantizer(E4M3).multi_quantize([values(), 2 * values()])
    assert_same(one, "mxfp8", values())
    assert_same(two, "mxfp8", 2 * values())
    with pytest.raises(UserError, match=r"dtype is torch.float16 for a tensor of torch.bfloat16; cast it before"):
        MXFP8Quantizer(E4M3).quantize(values(), dtype=torch.float16)
    empty = NVFP4Quantizer().make_empty((32, 64), device="meta", requires_grad=True)
    assert isinstance(empty, HybridQuantizedTensor) and empty.dtype is torch.float32 and empty.requires_grad


@pytest.mark.parametrize("text", MAKE)
def test_a_tensor_knows_a_copy_of_its_quantizer(text):
    quantizer = MAKE[text]()
    made = quantizer(values()), quantizer.make_empty((64, 128), device="cpu")
    quantizer.set_usage(rowwise=False)
    for tensor in made:
        own = tensor._quantizer
        assert type(own) is type(quantizer) and own.rowwise_usage and str(own) == str(quantizer)
        assert tensor.detach()._quantizer.frozen == tensor.quantizer
