"""What a call of GroupedLinear takes: splits, rows and dtypes, and what it says of others."""

import numpy as np
import pytest
import torch
from cases import BASES, BY_STEP, RANDOM
from support.nn.experts import (
    EXPERTS,
    FORMATS,
    ROWS,
    SECTIONS,
    SPLITS,
    K,
    N,
    assert_same_gradients,
    gradients,
    grouped,
    ids,
    recipe_of,
    singles,
    train,
)

import hqsweep.nn.grouped
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import GroupedLinear, GroupedLinearOptions, autocast, quantization, set_recipe
from hqsweep.ops.splits import Splits


@pytest.mark.feature("A15")
@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ((32, 32, 64), "m_splits has 3 entries for 4 experts"),
        ([], "m_splits has 0 entries for 4 experts"),
        (torch.tensor([128]), "m_splits has 1 entries for 4 experts"),
        ([48.5, 0, 16.5, 63], r"m_splits is \[48.5, 0, 16.5, 63\]; it takes a list, or an int32 or int64 tensor"),
        (["48", "0", "16", "64"], r"m_splits is \['48', .* of the rows of each expert"),
        ("aaaa", "m_splits is 'aaaa'; it takes a list"),
        (None, "m_splits is None; it takes a list"),
        (128, "m_splits is 128; it takes a list"),
        (torch.tensor([32, 32, 32, 33]), "m_splits adds up to 129 rows, and the matrix has 128"),
        (torch.tensor([-1, 43, 43, 43]), "m_splits has -1 for expert 0; numbers of rows are not negative"),
        (torch.tensor([[64, 64]]), r"m_splits is torch.int64 \(1, 2\); it takes int32 or int64 with one axis"),
        (torch.tensor([32] * 4, dtype=torch.uint8), "m_splits is torch.uint8"),
        (Splits.uniform(EXPERTS, 16), "m_splits is of 64 rows, and the matrix has 128"),
        (Splits.uniform(2, 64), "m_splits has 2 entries for 4 experts"),
    ],
    ids=str,
)
def test_splits_that_are_refused(splits, message):
    module = grouped()
    for _ in range(2):
        with pytest.raises(UserError, match=f"^experts: {message}"):
            module(draw("normal", ROWS, K), splits)
    assert module(draw("normal", ROWS, K), SPLITS).shape == (ROWS, N)


def test_splits_that_fitted_the_rows_of_another_call_are_refused():
    module, splits = grouped(), list(SPLITS)
    module(draw("normal", ROWS, K), splits)
    for rows in (ROWS - 1, ROWS + 1):
        with pytest.raises(UserError, match=f"m_splits adds up to 128 rows, and the matrix has {rows}"):
            module(draw("normal", rows, K), splits)


@pytest.mark.feature("A15")
def test_splits_of_every_kind_of_whole_numbers():
    module, x = grouped(), draw("normal", ROWS, K)
    expected = module(x, list(SPLITS))
    kinds = (SPLITS, np.array(SPLITS), [np.int32(m) for m in SPLITS], torch.tensor(SPLITS), (m for m in SPLITS))
    for splits in (*kinds, torch.tensor(SPLITS, dtype=torch.int32), Splits.of(SPLITS, ROWS)):
        assert torch.equal(module(x, splits), expected)


def test_another_width_is_refused():
    with pytest.raises(UserError, match="experts: x has 40 features, and the experts take 48"):
        grouped()(draw("normal", ROWS, 40), SPLITS)


@pytest.mark.feature("A15")
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("quantizers", FORMATS + SECTIONS, ids=ids)
def test_no_rows_at_all(quantizers, single):
    """A rank whose experts got no token: empty results, zero gradients, histories as they were."""
    module = grouped(quantizers, bias=True, single_grouped_weight=single, single_grouped_bias=single)
    x = torch.zeros(0, K, dtype=torch.bfloat16, requires_grad=True)
    with quantization(seed=1, step=1):
        y = module(x, [0] * EXPERTS)
        y.backward(torch.zeros(0, N, dtype=torch.bfloat16))
    assert y.shape == (0, N) and x.grad.shape == (0, K)
    assert all(g.shape == p.shape and not g.any() for g, p in ((p.grad, p) for p in module.parameters()))
    for states in module.states:
        assert not any(state.history.any() for name, state in states.items() if not name.startswith("weight"))


@pytest.mark.feature("A15")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("quantizers", [*BASES, RANDOM, *SECTIONS], ids=ids)
def test_experts_are_linears_in_other_dtypes(quantizers, dtype):
    module = grouped(quantizers, bias=True, dtype=dtype)
    assert_same_gradients(*train(module, singles(module)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_have_the_dtype_of_the_input(dtype):
    module, dy = grouped("mxfp8"), draw("normal", ROWS, N, 1)
    x = draw("heavy", ROWS, K).clamp(-50, 50).to(dtype).requires_grad_()
    y = module(x, SPLITS)
    y.backward(dy)
    assert y.dtype == torch.bfloat16 and x.grad.dtype == dtype
    linears, alone = singles(module), [part.detach().clone().requires_grad_() for part in x.split(SPLITS)]
    for linear, part, gradient, own in zip(linears, alone, dy.split(SPLITS), y.split(SPLITS), strict=True):
        out = linear(part)
        out.backward(gradient)
        assert torch.equal(out, own)
    assert torch.equal(x.grad, torch.cat([part.grad for part in alone]))
    assert_same_gradients(gradients(module), [gradients(linear) for linear in linears])


@pytest.mark.feature("A15")
@pytest.mark.parametrize("quantizers", [*BASES, *BY_STEP[1:], SECTIONS[0]], ids=ids)
def test_one_expert_is_one_linear(quantizers):
    module = GroupedLinear(
        1, K, N, name="experts", recipe=recipe_of(quantizers), options=GroupedLinearOptions(bias=True)
    )
    assert_same_gradients(*train(module, singles(module), splits=(ROWS,)))


def test_rows_that_are_not_contiguous():
    module, x = grouped(SECTIONS[0]), draw("normal", K, ROWS).t()
    assert torch.equal(module(x, SPLITS), module(x.contiguous(), SPLITS))
    wide = draw("normal", ROWS, K + 8)
    assert torch.equal(module(wide[:, :K], SPLITS), module(wide[:, :K].contiguous(), SPLITS))


@pytest.mark.parametrize("single", [False, True])
def test_a_training_goes_on_after_an_evaluation_in_inference_mode(single):
    """States of delayed scaling that the evaluation made are those that the training writes; of a Linear, too."""
    module = grouped("fp8_delayed")
    call = singles(module)[0] if single else lambda x: module(x, SPLITS)
    for step in (1, 2):
        x = draw("normal", ROWS, K, step)
        with torch.inference_mode(), quantization(seed=1, step=step):
            expected = call(x)
        with quantization(seed=1, step=step):
            y = call(x)
        y.float().sum().backward()
        assert torch.equal(y, expected)


@pytest.mark.feature("F74", "F77", "F84")
def test_experts_are_compared_once_for_a_recipe(monkeypatch):
    """When the module is built, when it takes a recipe, and at the first call under an autocast: never in a step."""
    place, seen = hqsweep.nn.grouped, []
    real = place.homogeneous
    monkeypatch.setattr(place, "homogeneous", lambda own, where: seen.append(where) or real(own, where))
    module, x, other = grouped("mxfp8"), draw("normal", ROWS, K), recipe_of("fp8_block")
    tensors = [f"experts: {tensor}" for tensor in ("input", "weight", "grad_output")]
    assert seen == tensors
    for _ in range(2):
        module(x, SPLITS).float().sum().backward()
    assert seen == tensors
    for _ in range(2):
        with autocast(recipe=other):
            module(x, SPLITS)
    assert seen == tensors * 2
    set_recipe(module, other)
    module(x, SPLITS)
    assert seen == tensors * 3


@pytest.mark.feature("A28")
@pytest.mark.gpu
@pytest.mark.parametrize("quantizers", ["bf16", "mxfp8", SECTIONS[1]], ids=ids)
def test_a_graph_of_a_forward_serves_other_splits(quantizers):
    """Captured with the splits on the device, biases included; nothing of them was read by the host."""
    options = {"single_grouped_weight": True, "single_grouped_bias": True, "bias": True}
    module = grouped(quantizers, **options).to(torch.bfloat16).cuda()
    x, splits = draw("normal", ROWS, K).cuda(), torch.tensor(SPLITS, dtype=torch.int32, device="cuda")
    with torch.no_grad():
        module(x, splits)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x, splits)
        for sizes in (SPLITS, SPLITS[::-1], (1, 0, 127, 0)):
            splits.copy_(torch.tensor(sizes, dtype=torch.int32))
            graph.replay()
            assert torch.equal(y, module(x, torch.tensor(sizes, device="cuda")))
