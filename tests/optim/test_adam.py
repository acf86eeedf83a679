"""FusedAdam: masters follow torch.optim.AdamW to the byte, parameters are their rounded or quantized form."""

import subprocess
import sys

import pytest
import torch
from cases import FEW
from support.optim.adam_cases import OPTIONS, mixed_parameters, quantized, value
from torch import nn

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, quantization, quantized_model_init
from hqsweep.optim import FusedAdam, use_main_grads
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.recipe import LinearQuantizers, Recipe


def adamw(start, steps=5, **options):
    """States of torch.optim.AdamW after each step from `start`, with the gradients that `train` gives."""
    p = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([p], **OPTIONS | options)
    for step in range(steps):
        p.grad = value(step + 1).to(p.dtype)
        optimizer.step()
        yield p.detach().clone(), {name: t.clone() for name, t in optimizer.state[p].items()}


def train(p, optimizer, steps):
    for step in steps:
        p.grad = value(step + 1).to(p.dtype)
        optimizer.step()
        yield optimizer.state[p]


@pytest.mark.parametrize("kernels", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("text", [*FEW, "nvfp4+sr"])
def test_masters_are_adamw_and_codes_are_theirs(text, kernels):
    p = quantized(text, preserve_high_precision_init_val=True)
    states = train(p, FusedAdam([p], **OPTIONS, **kernels), range(5))
    for step, ((master, expected), state) in enumerate(zip(adamw(value(), **kernels), states, strict=True)):
        assert torch.equal(state["master_param"], master)
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name
        key = RngKey(seed=0, slot="w", step=2 + step)
        again = HybridQuantizedTensor.quantize(master, p.quantizer, key=key)
        for name, buffer in again.buffers.items():
            assert torch.equal(p.buffers[name], buffer), name
    assert isinstance(p, HybridQuantizedTensor) and isinstance(p, nn.Parameter)


def test_without_a_preserved_value_masters_start_from_the_quantized_one():
    p = quantized("nvfp4|mxfp8")
    start = p.dequantize().detach()
    optimizer = FusedAdam([p], **OPTIONS)
    assert torch.equal(optimizer.master_param(p), start) and not optimizer.state
    for (master, _), state in zip(adamw(start), train(p, optimizer, range(5)), strict=True):
        assert torch.equal(state["master_param"], master)


def test_the_preserved_value_is_cleared_when_the_master_is_made():
    p = quantized("mxfp8", preserve_high_precision_init_val=True)
    optimizer = FusedAdam([p])
    assert torch.equal(optimizer.master_param(p), value())
    next(train(p, optimizer, [0]))
    assert p.get_high_precision_init_val() is None


def test_bf16_parameters_have_masters_too():
    p = nn.Parameter(value().bfloat16())
    q = nn.Parameter(value().bfloat16().float())
    reference = torch.optim.AdamW([q], **OPTIONS)
    for step, state in enumerate(train(p, FusedAdam([p], **OPTIONS), range(5))):
        q.grad = value(step + 1).bfloat16().float()
        reference.step()
        assert state["exp_avg"].dtype == torch.float32 and torch.equal(state["master_param"], q)
        assert p.dtype == torch.bfloat16 and torch.equal(p, q.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_high_precision_parameters_are_their_own_masters(dtype):
    start = value().to(dtype)
    p = nn.Parameter(start.clone())
    for (master, expected), state in zip(adamw(start), train(p, FusedAdam([p], **OPTIONS), range(5)), strict=True):
        assert torch.equal(p, master) and state.keys() == expected.keys()


def test_without_masters_bf16_is_updated_in_place_as_adamw_does():
    p = nn.Parameter(value().bfloat16())
    states = train(p, FusedAdam([p], master_weights=False, **OPTIONS), range(5))
    for (master, expected), state in zip(adamw(value().bfloat16()), states, strict=True):
        assert torch.equal(p, master) and state.keys() == expected.keys()


def test_quantized_parameters_without_masters_are_refused():
    with pytest.raises(UserError, match="1 parameters are quantized, such as one in mxfp8; they cannot be"):
        FusedAdam([quantized("mxfp8")], master_weights=False)


@pytest.mark.parametrize("text", [*FEW, "nvfp4+sr", None], ids=str)
def test_resuming_from_a_state_dict_is_going_on(text, tmp_path):
    def start():
        p = quantized(text, preserve_high_precision_init_val=True) if text else nn.Parameter(value().bfloat16())
        return p, FusedAdam([p], **OPTIONS)

    p, optimizer = start()
    list(train(p, optimizer, range(3)))
    torch.save({"p": p.detach(), "optimizer": optimizer.state_dict()}, tmp_path / "f")
    list(train(p, optimizer, range(3, 6)))
    q, resumed = start()
    state = torch.load(tmp_path / "f", weights_only=True)
    with torch.no_grad():
        q.copy_(state["p"])
    resumed.load_state_dict(state["optimizer"])
    master = state["optimizer"]["state"][0]["master_param"].clone()
    list(train(q, resumed, range(3, 6)))
    assert torch.equal(master, state["optimizer"]["state"][0]["master_param"])  # what was loaded is a copy
    assert optimizer.state[p].keys() == resumed.state[q].keys()
    for name, tensor in optimizer.state[p].items():
        assert tensor.dtype == resumed.state[q][name].dtype == torch.float32
        assert torch.equal(tensor, resumed.state[q][name]), name
    if text:
        assert q.get_high_precision_init_val() is None and p.metadata == q.metadata
        for name, buffer in p.buffers.items():
            assert torch.equal(buffer, q.buffers[name]), name
    else:
        assert torch.equal(p, q)


def test_a_state_of_adamw_goes_on_with_quantized_parameters():
    """The run so far was in FP32; its moments are taken, and masters start from the parameters."""
    q = nn.Parameter(value())
    plain = torch.optim.AdamW([q], **OPTIONS)
    list(train(q, plain, range(3)))
    p = quantized("nvfp4|mxfp8", preserve_high_precision_init_val=True)
    optimizer = FusedAdam([p], **OPTIONS)
    optimizer.load_state_dict(plain.state_dict())
    with torch.no_grad():
        p.copy_(q)
    list(train(p, optimizer, range(3, 6)))
    list(train(q, plain, range(3, 6)))
    assert torch.equal(optimizer.state[p]["master_param"], q)
    assert torch.equal(optimizer.state[p]["exp_avg_sq"], plain.state[q]["exp_avg_sq"])


def test_main_grad_is_the_gradient_where_there_is_one():
    p, q = quantized("mxfp8"), quantized("mxfp8")
    p.main_grad, q.grad = value(1), value(1)
    first, second = (FusedAdam([w], **OPTIONS) for w in (p, q))
    first.step()
    second.step()
    assert torch.equal(first.state[p]["master_param"], second.state[q]["master_param"])
    first.zero_grad()
    second.zero_grad()
    assert not p.main_grad.any() and q.grad is None
    p.grad = value(1)
    with pytest.raises(UserError, match=r"a parameter of shape \(64, 96\) has both grad and main_grad"):
        first.step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("step", [FusedAdam.step, lambda optimizer: optimizer.clip_and_step(1.0)], ids=["step", "clip"])
def test_operands_of_weights_that_were_kept_are_made_anew_after_a_step(fused, step):
    layer = Linear(32, 32, name="a", recipe=Recipe(linear=LinearQuantizers.parse("mxfp8", "test")))
    optimizer, x = FusedAdam(layer.parameters(), lr=0.5, fused=fused), torch.ones(4, 32, dtype=torch.bfloat16)
    with quantization(step=1, cache_weights=True):
        y = layer(x)
        y.float().square().sum().backward()
        step(optimizer)
        after = layer(x)
    assert torch.equal(after, layer(x)) and not torch.equal(after, y)


def test_what_has_no_gradient_stays_as_it_is():
    p, q = quantized("mxfp8"), nn.Parameter(value())
    before = p.rowwise_q.clone()
    optimizer = FusedAdam([{"params": [p], "lr": 1.0}, {"params": [q]}], **OPTIONS)
    q.grad = value(1)
    assert optimizer.step(lambda: torch.tensor(4.0)) == 4.0
    assert torch.equal(p.rowwise_q, before) and p not in optimizer.state and not torch.equal(q, value())


def test_gradients_of_microbatches_add_up_in_main_grads():
    """Two microbatches into FP32 main_grads against autograd's own sum, for a fused weight, a bias and a plain part."""
    models = []
    for held in (True, False):
        torch.manual_seed(0)
        with quantized_model_init(enabled=held, preserve_high_precision_init_val=True):
            linear = Linear(96, 64, name="l", recipe="mxfp8", bias=True)
        models.append(nn.Sequential(nn.RMSNorm(96), linear))
    fused, plain = models
    use_main_grads(fused)
    optimizers = [FusedAdam(model.parameters(), **OPTIONS) for model in models]
    for step in range(3):
        for microbatch in range(2):
            for model in models:
                model(value(2 * step + microbatch)).float().square().sum().backward()
        assert fused[1].fuse_wgrad_accumulation and all(p.grad is None for p in fused.parameters())
        for p, q in zip(fused.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.main_grad, q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(fused.parameters(), plain.parameters(), strict=True):
            assert torch.equal(optimizers[0].master_param(p), q)


@pytest.mark.parametrize("text", ["mxfp8|nvfp4", "nvfp4|mxfp8", "fp8_current|mxfp8"])
def test_loss_falls_at_every_step_with_mixed_formats(text):
    torch.manual_seed(0)
    recipe = {"input": text, "weight": text, "grad_output": text}
    with quantized_model_init():
        module = Linear(64, 64, name="l", recipe=recipe)
    optimizer = FusedAdam(module.parameters(), lr=5e-3)
    x, target, losses = draw("normal", 128, 64), draw("normal", 128, 64, 1), []
    for _ in range(10):
        loss = (module(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
@pytest.mark.parametrize("main_grads", [False, True])
def test_clipping_is_torchs_own(main_grads, max_norm):
    """On a CPU to the byte, in the order of the parameters that are given."""
    (ours, theirs), count = (mixed_parameters(), mixed_parameters()), 4 if main_grads else 3
    optimizers = [FusedAdam(ours[:count], **OPTIONS), FusedAdam(theirs[:count], **OPTIONS)]
    norm = optimizers[0].clip_and_step(max_norm, ours[count - 1 :: -1])
    for p in theirs[3:count]:
        p.grad = p.main_grad
        del p.main_grad
    expected = torch.nn.utils.clip_grad_norm_(theirs[count - 1 :: -1], max_norm)
    optimizers[1].step()
    assert torch.equal(norm, expected) and norm > 5
    for p, q in zip(ours[:count], theirs[:count], strict=True):
        assert torch.equal(optimizers[0].master_param(p), optimizers[1].master_param(q))


def test_a_rate_is_that_of_every_group():
    p, q = nn.Parameter(value()), nn.Parameter(value(1))
    optimizer = FusedAdam([{"params": [p], "lr": 1.0}, {"params": [q]}], **OPTIONS)
    optimizer.set_lr(0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.slow
def test_a_process_that_does_not_compile_never_imports_the_compiler():
    """torch's own optimizer does, which takes about as long as importing torch."""
    code = (
        "import sys, torch\n"
        "from hqsweep.optim import FusedAdam\n"
        "w = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))\n"
        "optimizer = FusedAdam([w])\n"
        "w.sum().backward()\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()\n"
        "optimizer.load_state_dict(optimizer.state_dict())\n"
        "assert w.grad is None and optimizer.state[w]['step'] == 1\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
