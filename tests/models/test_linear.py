"""Which linear is the output projection, and what a probe sees of products in high precision."""

import pytest
import torch
from torch import nn

import hqsweep
from hqsweep.formats.inputs import draw
from hqsweep.models.linear import output_projection
from hqsweep.nn import Linear, Probe, quantization


def model(rows=48, said=None):
    network = nn.Sequential(nn.Embedding(48, 16), nn.Linear(16, 48), nn.Linear(48, rows))
    if said:
        network.get_output_embeddings = lambda: said(network)
    return network


def refuses(network):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("network", "index"),
    [
        (model(), 2),
        (model(rows=47), None),
        (model(said=lambda made: made[1]), 1),
        (model(said=lambda made: None), 2),
        (model(said=refuses), 2),
        (nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), None),
        (nn.Sequential(nn.Embedding(48, 16)), None),
        (nn.Sequential(nn.Embedding(48, 16), nn.LazyLinear(48)), 1),
    ],
)
def test_it_is_the_one_that_the_model_says_or_the_last_with_a_row_for_each_word(network, index):
    assert output_projection(network) is (None if index is None else network[index])


def known(row):
    """The row of a tensor; of a product, which torch and our own CPU kernels sum in another order, what it is of."""
    return (
        row if row["tensor"] in ("input", "weight", "grad_output") else {k: row[k] for k in ("step", "layer", "tensor")}
    )


def run(module, dtype, probe=None):
    module.zero_grad()
    x = draw("heavy", 32, 64).clamp(-9, 9).to(dtype).requires_grad_()
    with quantization(seed=1, step=4, probe=probe):
        y = module(x)
    torch.relu_(y).backward(draw("normal", 32, 96, 1).to(dtype))
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize(("recipe", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)], ids=str)
def test_a_probe_changes_no_bit_and_sees_all(recipe, dtype):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 96, dtype=dtype))
    ours = Linear(64, 96, name="0", recipe=recipe, dtype=dtype, bias=True).to(dtype)
    ours.load_state_dict(plain[0].state_dict())
    expected = run(plain, dtype)
    hqsweep.convert(plain, recipe)
    probe, of_ours = Probe(step=4, capture=True), Probe(step=4, capture=True)
    assert all(map(torch.equal, run(plain, dtype, probe), expected))
    run(ours, dtype, of_ours)
    assert [row["tensor"] for row in probe.rows] == [row["tensor"] for row in of_ours.rows]
    assert probe.captured.keys() == {"0.input", "0.weight", "0.grad_output"}
    assert all(torch.equal(probe.captured[name], of_ours.captured[name]) for name in probe.captured)
    assert list(map(known, probe.rows)) == list(map(known, of_ours.rows))


def test_a_probe_sees_of_a_quantized_product_what_it_sees_of_ours():
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(64, 96)), []
    ours = Linear(64, 96, name="0", recipe="nvfp4|mxfp8", dtype=torch.float32, bias=True)
    ours.load_state_dict(model[0].state_dict())
    hqsweep.convert(model, "nvfp4|mxfp8")
    for module in (ours, model):
        probe = Probe(step=4)
        run(module, torch.float32, probe)
        rows.append(probe.rows)
    assert rows[0] == rows[1] and len(rows[0]) == 9


def test_a_probe_works_without_gradients_and_on_frozen_weights():
    model, probe = nn.Sequential(nn.Linear(64, 96)), Probe(step=1)
    hqsweep.convert(model, "fp32")
    with torch.no_grad(), quantization(step=1, probe=probe):
        model(torch.ones(4, 64))
    assert {row["tensor"] for row in probe.rows} == {"input", "weight", "fprop"}
    model.requires_grad_(False)
    x, probe = torch.ones(4, 64, requires_grad=True), Probe(step=2)
    with quantization(step=2, probe=probe):
        model(x).sum().backward()
    assert {row["tensor"] for row in probe.rows} == {"input", "weight", "fprop", "grad_output", "dgrad"}
