"""benchmarks/sensitivity.py: the planted faults are what they are called, and a row says what is found."""

import json

import numpy as np
import pytest
import torch

from benchmarks import forking, sensitivity
from benchmarks.rows import ROOT
from hqsweep.config.job import parse
from hqsweep.nn import quantization
from hqsweep.train import data

TOKENS = torch.arange(32).reshape(2, 16)


@pytest.fixture(scope="module")
def dataset() -> data.Dataset:
    return data.load(parse(sensitivity.CONFIG).data)


def gradients(dataset: data.Dataset, recipe: dict, plant: sensitivity.Plant | None = None) -> dict[str, torch.Tensor]:
    """The layer's output, and the gradients of its weight and of the weights before it, in the first step."""
    model = forking.trainer(dataset, sensitivity.CONFIG | recipe).model
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    if plant:
        plant(model)
    outputs = []
    linear = next(each for each in model.linears() if each.name == sensitivity.LAYER)
    linear.register_forward_hook(lambda module, args, output: outputs.append(output.detach().float()))
    with quantization(seed=0, step=1):
        model(TOKENS).square().mean().backward()
    before = next(each for each in model.linears() if each.name == "layers.1.mlp.fc1")
    return {"output": outputs[0], "wgrad": linear.weight.grad.float(), "dgrad": before.weight.grad.float()}


@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
def test_a_scale_that_is_off_doubles_one_product(dataset, product):
    right, wrong = (gradients(dataset, {}, plant) for plant in (None, getattr(sensitivity, f"double_{product}")))
    if product == "fprop":
        assert torch.equal(wrong["output"], 2 * right["output"])
        return
    assert torch.equal(wrong["output"], right["output"])
    other = "wgrad" if product == "dgrad" else "dgrad"
    torch.testing.assert_close(wrong[product], 2 * right[product], rtol=0.05, atol=1e-3 * right[product].abs().max())
    assert torch.equal(wrong[other], right[other])


@pytest.mark.parametrize("arm", ["stochastic rounding off: wgrad", "original for dequantized: wgrad"])
def test_a_wrong_quantizer_changes_wgrad_of_the_layer_alone(dataset, arm):
    right, wrong = gradients(dataset, {}), gradients(dataset, sensitivity.ARMS[arm][0])
    assert torch.equal(wrong["output"], right["output"]) and torch.equal(wrong["dgrad"], right["dgrad"])
    assert not torch.equal(wrong["wgrad"], right["wgrad"])


def test_a_row_says_what_is_found_and_from_where_on():
    rng = np.random.default_rng(0)
    gaps = {arm: rng.normal(0, 0.02, (4, 2)) for arm in sensitivity.ARMS}
    gaps["scale off by 2: fprop"] += 1
    rows = {row["case"]: row for row in sensitivity.judged(gaps)}
    assert rows["scale off by 2: fprop"]["verdict"] == "worse" and rows["null arm"]["verdict"] == "equivalent"
    assert all(0 < row["findable"] < 0.5 for row in rows.values())


def test_what_the_docs_say_of_faults_is_what_was_published():
    lines = (ROOT / "reports/benchmarks/sensitivity.jsonl").read_text().splitlines()
    rows = {row["case"]: row for row in map(json.loads, lines)}
    assert set(rows) == set(sensitivity.ARMS) and all(row["cpu_s"] <= 300 for row in rows.values())
    missed = [row for case, row in rows.items() if row["verdict"] == "equivalent" and case != "null arm"]
    (fault,) = (row for row in rows.values() if row["verdict"] == "worse")
    assert len(missed) == 4 and fault["case"] == "scale off by 2: dgrad" and rows["null arm"]["verdict"] == "equivalent"
    low, high = (f(row["findable"] for row in missed) for f in (min, max))
    text = " ".join((ROOT / "docs/reports.md").read_text().split())
    assert f"is found, at {fault['gap']:+.2f} %" in text and f"{low:.2f} to {high:.2f} % would have been found" in text
