"""FusedAdam on a GPU: hqsweep::adamw_ and torch's kernels, clipping, and CUDA graphs."""

import pytest
import torch
from cases import FEW
from support.optim.adam_cases import OPTIONS, mixed_parameters, quantized, value
from torch import nn

from hqsweep.optim import FusedAdam
from hqsweep.quant import HybridQuantizedTensor


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [{"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("text", FEW)
def test_gpu_masters_are_adamw(text, kernels):
    p = nn.Parameter(quantized(text, preserve_high_precision_init_val=True).detach().cuda())
    q = nn.Parameter(value().cuda())
    optimizers = FusedAdam([p], **OPTIONS, **kernels), torch.optim.AdamW([q], **OPTIONS, **kernels)
    for step in range(5):
        p.grad, q.grad = value(step + 1).cuda(), value(step + 1).cuda()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(optimizers[0].state[p]["master_param"], q)
        again = HybridQuantizedTensor.quantize(q.detach(), p.quantizer)
        for name, buffer in again.buffers.items():
            assert torch.equal(p.buffers[name], buffer), name


@pytest.mark.gpu
def test_gpu_masters_follow_those_of_a_cpu():
    """Averages to the bit; the CPU's square root is not always the nearest."""
    ours, theirs = (nn.Parameter(quantized("mxfp8").detach().to(device)) for device in ("cuda", "cpu"))
    optimizers = FusedAdam([ours], **OPTIONS), FusedAdam([theirs], **OPTIONS, foreach=False)
    for step in range(5):
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = value(step + 1).to(p.device)
            optimizer.step()
        state, expected = optimizers[0].state[ours], optimizers[1].state[theirs]
        assert state.keys() == expected.keys() and state["step"].is_cuda and state["step"] == step + 1
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name].cpu(), expected[name]), name
        torch.testing.assert_close(state["master_param"].cpu(), expected["master_param"], rtol=2**-22, atol=2**-24)
        again = HybridQuantizedTensor.quantize(state["master_param"], ours.quantizer)
        assert all(torch.equal(ours.buffers[name], buffer) for name, buffer in again.buffers.items())


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["fused", "maximize", "rate in a tensor", "turned"])
def test_gpu_what_the_kernel_does_not_take_is_torchs_fused_kernels(case):
    start = value().t() if case == "turned" else value()
    options = OPTIONS | ({"lr": torch.tensor(3e-2)} if case == "rate in a tensor" else {})
    group = {"maximize": True} if case == "maximize" else {}
    p, q = nn.Parameter(start.cuda()), nn.Parameter(start.cuda())
    ours = FusedAdam([{"params": [p], **group}], **options, **({"fused": True} if case == "fused" else {}))
    theirs = torch.optim.AdamW([{"params": [q], **group}], **options, fused=True)
    for step in range(3):
        gradient = value(step + 1).view_as(p) if case != "turned" else value(step + 1).t()
        p.grad, q.grad = gradient.cuda(), gradient.cuda()
        ours.step()
        theirs.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_clipping_within_the_fused_kernel_is_torchs_own_up_to_rounding(max_norm, device):
    ours, theirs = mixed_parameters(device), mixed_parameters()
    options = {"fused": True} if device == "cpu" else {}
    optimizers = FusedAdam(ours, **OPTIONS, **options), FusedAdam(theirs, **OPTIONS)
    for step in range(2):
        for p, q in zip(ours, theirs, strict=True):
            for name in ("main_grad",) if hasattr(p, "main_grad") else ("grad",):
                gradient = getattr(p, name).mul_(step + 1)
                setattr(q, name, gradient.to("cpu", copy=True))
        norm, expected = (optimizer.clip_and_step(max_norm) for optimizer in optimizers)
        torch.testing.assert_close(norm.cpu(), expected, rtol=2**-8, atol=0)  # torch rounds norms of bf16 gradients
        for p, q in zip(ours, theirs, strict=True):
            masters = (
                optimizer.master_param(w).detach().cpu() for optimizer, w in zip(optimizers, (p, q), strict=True)
            )
            torch.testing.assert_close(*masters, rtol=1e-5, atol=3e-5)
            assert optimizers[0].state[p]["step"].device.type == device


@pytest.mark.gpu
def test_gpu_specials_reach_the_weights():
    for special in (torch.nan, torch.inf):
        parameters = mixed_parameters("cuda")
        parameters[1].grad[3, 4] = special
        optimizer = FusedAdam(parameters, **OPTIONS)
        norm = optimizer.clip_and_step(1.0)
        assert not norm.isfinite() and parameters[1][3, 4].isnan()


@pytest.mark.gpu
def test_gpu_graphs_hold_a_step_and_follow_the_rate():
    """Captured once, replayed under other gradients and rates: the bytes of as many steps without a graph."""

    def train(steps):
        parameters = mixed_parameters("cuda")
        optimizer = FusedAdam(parameters, **OPTIONS)
        static, graph = [p.main_grad if p.grad is None else p.grad for p in parameters], None
        for step in range(6):
            optimizer.set_lr(3e-2 / (step + 1))
            for index, gradient in enumerate(static):
                gradient.copy_(value(10 * step + index))
            if graph is None and step == steps:
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    norm = optimizer.clip_and_step(1.0)
            if graph is None:
                norm = optimizer.clip_and_step(1.0)
            else:
                graph.replay()
        return norm, parameters, optimizer

    (norm, parameters, optimizer), (other, copies, again) = train(2), train(None)
    assert torch.equal(norm, other)
    for p, q in zip(parameters, copies, strict=True):
        assert torch.equal(optimizer.master_param(p), again.master_param(q))
        assert optimizer.state[p]["step"] == again.state[q]["step"] == 6


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [{}, {"foreach": True}], ids=str)
def test_gpu_states_of_other_kernels_are_gone_on_with(kernels):
    """Steps counted on the CPU, as the foreach kernels do, and on a GPU."""
    parameters, copies = mixed_parameters("cuda"), mixed_parameters("cuda")
    first = FusedAdam(parameters, foreach=True, **OPTIONS)
    first.clip_and_step(1.0)
    state = first.state_dict()
    state["param_groups"][0]["foreach"] = kernels.get("foreach")
    second = FusedAdam(copies, **OPTIONS, **kernels)
    second.load_state_dict(state)
    second.clip_and_step(1.0)
    assert all(second.state[p]["step"] == 2 and second.state[p]["step"].is_cuda != bool(kernels) for p in copies)
