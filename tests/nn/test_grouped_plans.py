"""GroupedLinear on the plan of a GPU, which torch has for a CPU, too, and with splits that the host does not know."""

import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from cases import BF16_BASES, RANDOM, crossed
from support.nn.experts import EXPERTS, FORMATS, GPU, ROWS, SECTIONS, SPLITS, K, N, gradients, hidden, ids, recipe_of
from support.nn.experts import grouped as looped
from torch.utils._python_dispatch import TorchDispatchMode

from hqsweep.errors import UserError
from hqsweep.formats import parse
from hqsweep.formats.inputs import draw
from hqsweep.gemm import grouped as products
from hqsweep.gemm.exact import mm_t
from hqsweep.nn import GroupedLinear, GroupedLinearOptions, autocast, quantization, quantized_model_init

grouped = partial(looped, plan_capability=GPU)
EQUAL = (ROWS // EXPERTS,) * EXPERTS
EXACT_IN_BF16 = [text for text in FORMATS if parse(text).fits_bf16]
single_and_held = pytest.mark.parametrize(
    ("quantizers", "single", "held"),
    crossed(EXACT_IN_BF16 + SECTIONS, [False, True], [False, True], whole=["nvfp4", SECTIONS[1]]),
    ids=str,
)


@pytest.fixture
def used(monkeypatch):
    """How often torch._grouped_mm was called, by number of axes of its second operand, and "bmm"."""
    seen, real, real_bmm = [], torch._grouped_mm, torch.bmm

    def spy(a, b, **options):
        seen.append(b.dim())
        return real(a, b, **options)

    def spy_bmm(a, b):
        seen.append("bmm")
        return real_bmm(a, b)

    monkeypatch.setattr(products, "grouped_mm", spy)
    monkeypatch.setattr(torch, "bmm", spy_bmm)
    return seen


@pytest.fixture
def native(monkeypatch):
    """Stands in for torch._scaled_grouped_mm, whose own checks are made on meta tensors; shapes of its results."""
    seen, real = [], torch._scaled_grouped_mm

    def scaled(a, b, scale_a, scale_b, *, offs, **options):
        meta = real(*(t.to("meta") for t in (a, b, scale_a, scale_b)), offs=offs.to("meta"), **options)
        values = a.float() * scale_a[:, None]
        y = torch._grouped_mm(values, b.float() * scale_b[:, None], offs=offs)
        seen.append(y.shape)
        assert meta.shape == y.shape and meta.dtype == torch.bfloat16
        return y.to(torch.bfloat16)

    monkeypatch.setattr("hqsweep.gemm.native.mm_t_native", mm_t)
    monkeypatch.setattr(products, "scaled_grouped_mm", scaled)
    return seen


def run(module, splits, step=1):
    module.zero_grad()
    x = draw("normal", ROWS, K).requires_grad_()
    with quantization(seed=1, step=step):
        y = module(x, splits)
        y.backward(draw("normal", ROWS, N, 1))
    return {"y": y.detach(), "x": x.grad} | {name: g.clone() for name, g in gradients(module).items()}


def assert_close(ours, theirs, rtol):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=rtol, atol=rtol * float(expected.abs().max() + 1e-30))


@single_and_held
def test_the_kernel_computes_what_the_loop_does(used, quantizers, single, held):
    """Up to the order of sums: matrices are float32 here, so that nothing else is rounded."""
    with quantized_model_init(enabled=held), quantization(seed=1, step=0):
        module = grouped(quantizers, single_grouped_weight=single, single_grouped_bias=single, bias=True)
    ours = run(module, hidden())
    assert used == [3, 3, 2]  # fprop, dgrad, and a wgrad without host splits
    module.plan_capability = None
    assert_close(ours, run(module, SPLITS), 2**-7)
    assert len(used) == 3


@pytest.mark.feature("H30")
@pytest.mark.parametrize("single", [False, True])
def test_main_grad_adds_up_what_the_kernel_gives(used, single):
    """Over microbatches, in float32, where only a device knows the splits."""
    plain, fused = (
        grouped("mxfp8", single_grouped_weight=single, fuse_wgrad_accumulation=fuse) for fuse in (False, True)
    )
    expected = [torch.zeros(w.shape) for w in plain.weights]
    for weight in fused.weights:
        weight.main_grad = torch.zeros(weight.shape)
    for step in (1, 2):
        run(plain, hidden(), step)
        run(fused, hidden(), step)
        for total, weight in zip(expected, plain.weights, strict=True):
            total += weight.grad
    assert used == [3, 3, 2] * 4
    assert all(map(torch.equal, [weight.main_grad for weight in fused.weights], expected))


@pytest.mark.feature("H31")
@single_and_held
def test_experts_of_equal_size_are_one_batch(used, quantizers, single, held):
    """Also gradients of float32 weights, and of main_grad. A device that alone knows the splits does not wait."""
    with quantized_model_init(enabled=held), quantization(seed=1, step=0):
        options = {"single_grouped_weight": single, "single_grouped_bias": single, "bias": True}
        module, other = (grouped(quantizers, **options) for _ in range(2))
    ours = run(module, EQUAL)
    assert used == ["bmm"] * 3
    run(module, hidden(EQUAL))
    assert used[3:] == [3, 3, 2]
    other.plan_capability = None
    assert_close(ours, run(other, EQUAL), 2**-7)
    assert len(used) == 6


@pytest.mark.feature("H31")
@pytest.mark.parametrize("single", [False, True])
def test_a_batch_keeps_float32_gradients_unrounded(used, single):
    """Gradients of whole numbers are those of the loop to the byte, with weights or a main_grad in float32."""
    runs = []
    for build in (grouped, looped):
        modules = [build("bf16", single_grouped_weight=single, fuse_wgrad_accumulation=fuse) for fuse in (0, 1)]
        for weight in modules[1].to(torch.bfloat16).weights:
            weight.main_grad = torch.ones(weight.shape)
        for module in modules:
            generator = torch.Generator().manual_seed(0)
            x, dy = (torch.randint(-99, 100, (ROWS, n), generator=generator).bfloat16() for n in (K, N))
            module(x, EQUAL).backward(dy)
        runs.append([grad for module in modules for grad in gradients(module).values()])
    assert used == ["bmm"] * 4
    assert all(map(torch.equal, *runs)) and any((grad != grad.bfloat16()).any() for grad in runs[0])


@pytest.mark.feature("H31")
def test_plans_follow_the_splits_of_the_call(used):
    """One expert is as large as itself; all without tokens are no batch."""
    module = grouped("mxfp8", single_grouped_weight=True).to(torch.bfloat16)
    runs = []
    for splits, expected in ((EQUAL, ["bmm"] * 3), (SPLITS, [3, 3, 2]), (EQUAL, ["bmm"] * 3)):
        used.clear()
        runs.append(run(module, splits))
        assert used == expected
    assert all(torch.equal(runs[0][name], runs[2][name]) for name in runs[0])
    used.clear()
    assert module(torch.empty(0, K), [0] * EXPERTS).shape == (0, N) and "bmm" not in used
    used.clear()
    one = GroupedLinear(1, K, N, name="e", recipe=recipe_of("mxfp8"), options=GroupedLinearOptions(plan_capability=GPU))
    run(one, [ROWS])
    assert used == ["bmm"] * 3


def test_gradients_in_float32_are_a_loop_where_the_host_knows_the_splits(used):
    module = grouped("mxfp8", single_grouped_weight=True)
    run(module, SPLITS)
    assert used == [3, 3]
    run(module.to(torch.bfloat16), SPLITS)
    assert used == [3, 3, 3, 3, 2] and module.weight.grad.shape == (EXPERTS, N, K)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_native_rows_of_e4m3_codes_are_one_kernel(native, single, held):
    """fprop is; dgrad with E5M2 gradients, and every wgrad, are loops."""
    forward = {"input": "fp8_current", "weight": "fp8_current", "grad_output": "fp8_current"}
    for gradient, count in (("fp8_current", 2), ("fp8_current+e5m2", 1)):
        with quantized_model_init(enabled=held):
            modules = [
                grouped(forward | {"grad_output": gradient}, single_grouped_weight=single, gemm=gemm)
                for gemm in ("native", "exact")
            ]
        modules[1].plan_capability = None
        expected = run(modules[1], SPLITS)
        native.clear()
        assert_close(run(modules[0], SPLITS), expected, 2**-7)
        assert native == [(ROWS, N), (ROWS, K)][:count]


def test_native_products_without_a_kernel_are_exact_where_the_host_knows_no_splits(native, used):
    """dgrad with E5M2 gradients and every wgrad have the bits of gemm=exact, and no host waits."""
    section = {"input": "fp8_current", "weight": "fp8_current", "grad_output": "fp8_current+e5m2"}
    results = {}
    for gemm in ("native", "exact"):
        splits = hidden()
        results[gemm] = run(grouped(section, gemm=gemm), splits)
        assert "host" not in vars(splits)
    assert [shape[1] for shape in native] == [N]  # fprop alone
    for name, value in results["exact"].items():
        same = torch.equal(results["native"][name], value)
        assert same if name != "y" else not same


@pytest.mark.feature("T17")
@pytest.mark.parametrize("quantizers", [*BF16_BASES, SECTIONS[1]], ids=ids)
def test_forward_and_the_gradient_of_the_input_wait_for_no_splits(used, quantizers):
    """Whether they are computed on exact operands of the rows alone; the loop asks for the splits."""
    module, expected = grouped(quantizers, bias=True), run(grouped(quantizers, bias=True), SPLITS)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    splits, x = hidden(), draw("normal", ROWS, K).requires_grad_()
    with quantization(seed=1, step=1):
        y = module(x, splits)
        y.backward(draw("normal", ROWS, N, 1))
    assert "host" not in vars(splits) and used[-2:] == [3, 3]
    assert torch.equal(y, expected["y"]) and torch.equal(x.grad, expected["x"])


@pytest.mark.feature("T17")
@pytest.mark.parametrize("quantizers", FORMATS + SECTIONS, ids=ids)
def test_splits_that_only_a_device_knows_give_the_same_bits(quantizers):
    """On the loop: buffers that have room for any splits hold the same operands."""
    ours, theirs = (run(looped(quantizers, bias=True), splits) for splits in (hidden(), SPLITS))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("quantizers", BF16_BASES)
@pytest.mark.parametrize("splits", [EQUAL, SPLITS])
def test_an_output_may_be_written_in_place(used, quantizers, splits):
    module, x = grouped(quantizers), draw("normal", ROWS, K).requires_grad_()
    with quantization():
        module(x, splits).add_(1.0).sum().backward()
    assert used and x.grad.abs().sum() > 0


class Operators(TorchDispatchMode):
    """How often each operator is called, autograd's own included."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[function.name()] += 1
        return function(*args, **(kwargs or {}))


def operators_of_a_step(experts, quantizers, equal):
    """Operators of a forward and backward that is not the first."""
    options = GroupedLinearOptions(single_grouped_weight=True, plan_capability=GPU)
    module = GroupedLinear(experts, K, N, name="e", recipe=recipe_of(quantizers), options=options).to(torch.bfloat16)
    x, dy = draw("normal", 32 * experts, K).requires_grad_(), draw("normal", 32 * experts, N)
    splits = [32] * experts if equal else [16, 48, *[32] * (experts - 2)]
    module(x, splits).backward(dy)
    module.zero_grad()
    with Operators() as operators:
        module(x, splits).backward(dy)
    return operators.seen


@pytest.mark.parametrize("quantizers", [*BF16_BASES, RANDOM, *SECTIONS[:2]], ids=ids)
@pytest.mark.parametrize("equal", [False, True])
def test_the_host_does_nothing_for_single_experts(used, quantizers, equal):
    """Not so much as a view of its tensors."""
    assert operators_of_a_step(2, quantizers, equal) == operators_of_a_step(9, quantizers, equal)
    assert used == (["bmm"] * 3 if equal else [3, 3, 2]) * 4


@pytest.mark.parametrize("quantizers", [*BF16_BASES, SECTIONS[1]], ids=ids)
@pytest.mark.parametrize("splits", [SPLITS, EQUAL], ids=["ragged", "equal"])
def test_operands_of_the_kernel_are_not_put_together_again(used, quantizers, splits, monkeypatch):
    """Every operand is made where torch._grouped_mm and torch.bmm take it."""
    module = grouped(quantizers, single_grouped_weight=True).to(torch.bfloat16)
    monkeypatch.setattr(torch, "cat", lambda *_, **__: pytest.fail("operands are copied"))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_, **__: pytest.fail("operands are copied"))
    run(module, splits)
    assert used == ([3, 3, 2] if splits == SPLITS else ["bmm"] * 3)


@pytest.mark.feature("H30")
def test_plans_follow_the_recipe_of_the_call(used):
    """What one recipe multiplies by the kernel, another one in force for the same module may not."""
    module = grouped("mxfp8", single_grouped_weight=True).to(torch.bfloat16)
    run(module, SPLITS)
    with autocast(recipe=recipe_of("fp8_block+fp32_scale")):
        run(module, SPLITS)
    assert used == [3, 3, 2]
    run(module, SPLITS)
    assert used == [3, 3, 2] * 2
    with autocast(recipe=recipe_of("mxfp8", gemm="native")), pytest.raises(UserError, match="gemm=native needs a GPU"):
        run(module, SPLITS)


def test_splits_may_change_between_calls_and_modules_are_copied_without_them(used):
    module, other = (grouped("mxfp8", single_grouped_weight=True).to(torch.bfloat16) for _ in range(2))
    turned = SPLITS[::-1]
    results = [run(module, list(splits))["y"] for splits in (SPLITS, turned, SPLITS)]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], run(other, hidden(turned))["y"])
    copied = pickle.loads(pickle.dumps(module))
    assert torch.equal(run(copied, SPLITS)["y"], results[0])


class Quantizations(TorchDispatchMode):
    """Rows and formats ("" for a direction that is not made) of every call of the operator that quantizes."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name().startswith("hqsweep::quantize"):
            row, column = [text for text in args if isinstance(text, str)]
            self.calls.append((len(args[0]), row, column))
        return function(*args, **(kwargs or {}))


@pytest.mark.feature("F73", "F85", "F76")
def test_bulk_calls_are_one_for_each_tensor_and_ask_for_what_is_read():
    """x, w and dy, all experts in one call, and no direction that no product reads."""
    module, rows = grouped("mxfp8|fp8_block", single_grouped_weight=True), ROWS
    of_weights, x_and_w = EXPERTS * N, [(rows, "mxfp8", "fp8_block"), (EXPERTS * N, "mxfp8", "")]
    for frozen, expected in (
        ("nothing", [*x_and_w, (rows, "mxfp8", "fp8_block"), (of_weights, "", "fp8_block")]),
        ("weight", [(rows, "mxfp8", ""), x_and_w[1], (rows, "mxfp8", ""), (of_weights, "", "fp8_block")]),
        ("input", [*x_and_w, (rows, "", "fp8_block")]),
    ):
        module.weight.requires_grad_(frozen != "weight")
        x = draw("normal", ROWS, K).requires_grad_(frozen != "input")
        with Quantizations() as seen:
            module(x, SPLITS).backward(draw("normal", ROWS, N))
        assert seen.calls == expected, frozen
    with Quantizations() as seen, torch.no_grad():
        module(draw("normal", ROWS, K), SPLITS)
    assert seen.calls == [(rows, "mxfp8", ""), (of_weights, "mxfp8", "")]
