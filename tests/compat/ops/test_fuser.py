"""Channels between operations, and fusions that a user registers: values and gradients are the operations' own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.compat import MXFP8BlockScaling, autocast, ops
from hqsweep.compat.ops import fuser
from hqsweep.errors import UserError

D, M = 64, 32


def rows(seed: int = 0, width: int = D) -> Tensor:
    return torch.randn(M, width, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.fixture
def register(monkeypatch):
    """Registers a function that fuses the first operations whose types are those of a FusedOperation's PARTS."""

    def registered(which: str, fused: type) -> None:
        def function(given, *, recipe):
            size = len(fused.PARTS)
            for at in range(len(given) - size + 1):
                if all(isinstance(op, kind) for op, kind in zip(given[at:], fused.PARTS, strict=False)):
                    return [*given[:at], fused(given[at : at + size]), *given[at + size :]]
            return given

        getattr(ops, f"register_{which}_fusion")(function)

    monkeypatch.setattr(fuser, "_REGISTERED", {"forward_backward": [], "forward": [], "backward": []})
    return registered


@pytest.mark.parametrize("to_caller", [False, True])
def test_channels_carry_outputs_to_later_operations(to_caller):
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "residual", output_to_caller=to_caller)
    add.set_extra_input_channel(0, "residual")
    torch.manual_seed(0)
    model = ops.Sequential(ops.LayerNorm(D), make, ops.Linear(D, D), add)
    x = rows()
    y, *outputs = model(x) if to_caller else (model(x),)
    h = F.layer_norm(x, (D,))
    torch.testing.assert_close(y, F.linear(h, model[2].weight, model[2].bias) + h)
    assert len(outputs) == to_caller and all(torch.equal(out, h) for out in outputs)
    with pytest.raises(
        RuntimeError, match=r"Cannot change extra tensor channels of MakeExtraOutput: .* already captured"
    ):
        make.set_extra_output_channel(0, None)


def test_channels_need_a_source_and_have_one():
    reads = ops.AddExtraInput().set_extra_input_channel(0, "a")
    with pytest.raises(UserError, match="AddExtraInput: channel 'a' has no producer in the same fuser"):
        ops.Sequential(ops.GELU(), reads)(rows())
    with pytest.raises(UserError, match="AddExtraInput: channel 'b' has no earlier producer in the same fuser"):
        late = ops.MakeExtraOutput().set_extra_output_channel(0, "b")
        ops.OperationFuser([ops.AddExtraInput().set_extra_input_channel(0, "b"), late])
    twice = [ops.MakeExtraOutput().set_extra_output_channel(0, "a") for _ in range(2)]
    with pytest.raises(UserError, match="MakeExtraOutput: channel 'a' has multiple producers"):
        ops.Sequential(*twice)(rows())
    with pytest.raises(IndexError, match="GELU: slot 0 is out of range; there are 0 extra inputs"):
        ops.GELU().set_extra_input_channel(0, "a")
    with pytest.raises(UserError, match="channel is 3; it must be a non-empty string or None"):
        ops.AddExtraInput().set_extra_input_channel(0, 3)


def test_fused_operations_have_parts():
    class Both(ops.FusedOperation):
        pass

    x = rows()
    assert torch.equal(Both([ops.ReLU(), ops.ConstantScale(2.0)])(x), 2 * F.relu(x))
    with pytest.raises(UserError, match="Both: there are no basic operations"):
        Both([])


class Tripled(ops.FusedOperation):
    """A product and an activation, whose forward is three times theirs, so that it shows."""

    PARTS = (ops.BasicLinear, ops.Bias, ops.SiLU)

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        linear, bias, _ = self.basic_ops
        return 3 * F.silu(F.linear(input_, linear.weight, bias.bias)), [(), (), ()]


def model_of(*last) -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(ops.LayerNorm(D), ops.Linear(D, D), ops.SiLU(), *last)


@pytest.mark.parametrize("recipe", [None, MXFP8BlockScaling()])
def test_a_fused_forward_has_the_gradients_of_its_parts(recipe, register):
    plain, model, x = model_of(), model_of(), rows()
    with autocast(enabled=recipe is not None, recipe=recipe):
        expected = plain(x)
        register("forward", Tripled)
        y = model(x)
    torch.testing.assert_close(y, 3 * expected, rtol=0.1, atol=0.3)
    assert [type(op).__name__ for op, _ in model._groups[0].forward_ops] == ["LayerNorm", "Tripled"]
    ours, theirs = (
        torch.autograd.grad(out, (x, *m.parameters()), rows(1)) for out, m in ((y, model), (expected, plain))
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with torch.no_grad(), autocast(enabled=recipe is not None, recipe=recipe):
        assert torch.equal(model(x), y)


class LinearBackward(ops.FusedOperation):
    """The backward of a scale and a product, in float64."""

    PARTS = (ops.ConstantScale, ops.BasicLinear)

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        x, w = basic_op_ctxs[1].saved_tensors
        dy, x, w = grad_output.double(), x.double(), w.double()
        dx, dw = (self.basic_ops[0].scale * dy @ w, dy.T @ x)
        return dx.to(basic_op_ctxs[1].dtype), [(), (dw.float(),)], [(), ()]


def test_a_fused_backward_reads_what_operations_save(register):
    torch.manual_seed(0)
    model, x = ops.Sequential(ops.ReLU(), ops.ConstantScale(0.5), ops.Linear(D, D), ops.GELU()), rows()
    expected = model(x)
    theirs = torch.autograd.grad(expected.square().sum(), (x, *model.parameters()))
    register("backward", LinearBackward)
    again = ops.Sequential(*model)
    y = again(x)
    assert torch.equal(y, expected)
    ours = torch.autograd.grad(y.square().sum(), (x, *model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    group = again._groups[0]
    assert [places for _, places in group.backward_ops] == [[0], [1, 2], [3], [4]] and len(group.forward_ops) == 5


class Residual(ops.FusedOperation):
    """x + x + bias, with a channel of its own; `returned` is its extra output."""

    PARTS = (ops.MakeExtraOutput, ops.Bias, ops.AddExtraInput)

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        assert basic_op_extra_inputs[2] == [None]
        basic_op_ctxs[0].save_for_backward(input_)
        to_caller = self.basic_ops[0].channels["output", 0][1]
        return 2 * input_ + self.basic_ops[1].bias, [(input_ if to_caller else None,), (), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (of_output,) = basic_op_grad_extra_outputs[0]
        dx = 2 * grad_output + (0 if of_output is None else of_output)
        return dx, [(), (grad_output.sum(0),), ()], [(), (), (grad_output,)]


@pytest.mark.parametrize("which", ["forward", "backward", "forward_backward"])
@pytest.mark.parametrize("to_caller", [False, True])
def test_a_fusion_may_hold_a_channel(which, to_caller, register):
    make = ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=to_caller)
    model = ops.Sequential(make, ops.Bias(D), ops.AddExtraInput().set_extra_input_channel(0, "x"))
    torch.nn.init.normal_(model[1].bias)
    register(which, Residual)
    x, dy = rows(), (rows(1), rows(2))
    outputs = model(x)
    y, *extra = outputs if to_caller else (outputs,)
    torch.testing.assert_close(y, 2 * x + model[1].bias)
    dx, db = torch.autograd.grad([y, *extra], (x, model[1].bias), dy[: 1 + to_caller])
    torch.testing.assert_close(dx, 2 * dy[0] + to_caller * dy[1])
    torch.testing.assert_close(db, dy[0].sum(0))
    group = model._groups[0]
    counts = [1 if which in (own, "forward_backward") else 3 for own in ("forward", "backward")]
    assert [len(group.forward_ops), len(group.backward_ops)] == counts


@pytest.mark.parametrize(("to_caller", "said"), [(True, "extra output 0 is public"), (False, "outside its forward")])
def test_an_extra_output_that_is_read_must_be_there(to_caller, said, register):
    class Nothing(ops.FusedOperation):
        PARTS = (ops.MakeExtraOutput,)

        def fuser_forward(self, basic_op_ctxs, input_, **_):
            return input_, [(None,)]

    make = ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=to_caller)
    model = ops.Sequential(make, ops.AddExtraInput().set_extra_input_channel(0, "x"))
    register("forward", Nothing)
    with pytest.raises(RuntimeError, match=said):
        model(rows())


@pytest.mark.parametrize("given", [[], [ops.ReLU()]])
def test_a_fusion_keeps_all_operations(given, register):
    ops.register_forward_fusion(lambda own, **_: given, prepend=True)
    with pytest.raises(RuntimeError, match=r"a registered fusion gave the operations \[.*\] in place of \['GELU'\]"):
        ops.Sequential(ops.GELU())(rows())
