"""A CUDA graph of a converted model: forward and backward of a step, which draws the random bits of every step.

For fused attention transformers makes a mask in a graph alone, but not for rows that are unpacked (test_unpacked.py).
"""

import pytest
import torch
import transformers
from packaging.version import Version
from support.models.llamas import differences, llama, loss_of, results, tokens

import hqsweep
from hqsweep.nn import quantization

pytestmark = pytest.mark.gpu


MAKES_MASKS = "before 5.21 transformers makes masks of eager attention of a number on the CPU, which no capture can"
EAGER = pytest.param(
    "eager", marks=pytest.mark.skipif(Version(transformers.__version__) < Version("5.21"), reason=MAKES_MASKS)
)


@pytest.mark.parametrize("attention", [EAGER, "sdpa"])
def test_a_captured_step_is_every_step(attention, deterministic):
    model = llama(layers=1, attn_implementation=attention).cuda().train()
    conversion = hqsweep.convert(model, "nvfp4+sr")
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    batch, side = tokens(1).cuda(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()

    def forward_and_backward():
        model.zero_grad(set_to_none=False)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        return loss

    with hqsweep.unpacked(), quantization(seed=1, counter=counter):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward_and_backward()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            loss = forward_and_backward()
    assert not conversion.unused()
    for step in (1, 2, 3):
        counter.fill_(step)
        batch.copy_(tokens(step))
        graph.replay()
        got = {"loss": loss.detach().clone()} | {name: p.grad.clone() for name, p in model.named_parameters()}
        eager = llama(layers=1, attn_implementation=attention).cuda().train()
        hqsweep.convert(eager, "nvfp4+sr")
        with quantization(seed=1, step=step):
            assert not differences(results(eager, step), got)
    assert loss_of(model, 4) > 0
