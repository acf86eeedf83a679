"""Weights that are quantized once for as long as they stay what they are."""

import ctypes
import pickle

import pytest
import torch
import torch.distributed as dist
from cases import SOME, STATELESS, bare, crossed
from support.nn.experts import EXPERTS, GPU, ROWS, SPLITS, K, N, grouped
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import hqsweep
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, quantization, set_recipe
from hqsweep.nn.core.call import LinearCall
from hqsweep.nn.core.context import unwritten
from hqsweep.optim import FusedAdam
from hqsweep.recipe import Recipe

BOTH = ["rowwise", "columnwise"]
SR = {"input": "nvfp4", "weight": "nvfp4+sr", "grad_output": "nvfp4"}


@pytest.fixture
def quantizations(monkeypatch):
    """The directions of every quantization of a weight."""
    seen, real = [], LinearCall.quantize

    def spy(self, tensor, x, **options):
        if tensor == "weight":
            seen.append([d for d in BOTH if options.get(d)])
        return real(self, tensor, x, **options)

    monkeypatch.setattr(LinearCall, "quantize", spy)
    return seen


def linear(quantizers="mxfp8"):
    torch.manual_seed(0)
    return Linear(64, 96, name="layer", recipe=bare(quantizers))


def train(module, index):
    x = draw("normal", 32, 64, index).requires_grad_()
    y = module(x)
    y.backward(draw("normal", 32, 96, index))
    return y.detach(), x.grad


def assert_trained_alike(cached, plain, batches=3, **context):
    for index in range(batches):
        with quantization(cache_weights=True, **context):
            a = train(cached, index)
        with quantization(**context):
            b = train(plain, index)
        assert all(map(torch.equal, a, b))
    assert torch.equal(cached.weight.grad, plain.weight.grad)


@pytest.mark.feature("F70")
@pytest.mark.parametrize("quantizers", SOME, ids=str)
def test_microbatches_share_operands_and_have_the_same_bits(quantizations, quantizers):
    cached, plain = linear(quantizers), linear(quantizers)
    assert_trained_alike(cached, plain, seed=1, step=2)
    assert quantizations.count(BOTH) == 1  # and without, each direction of each batch by itself
    assert quantizations.count(["rowwise"]) == quantizations.count(["columnwise"]) == 3 and len(quantizations) == 7


def test_a_written_weight_is_quantized_again(quantizations):
    module = linear()
    with quantization(step=1, cache_weights=True):
        before, _ = train(module, 0)
        with torch.no_grad():
            module.weight.mul_(2.0)
        after, _ = train(module, 0)
    assert quantizations == [BOTH, BOTH] and torch.equal(after, 2 * before)


@pytest.mark.feature("F70")
@pytest.mark.parametrize("text", [text for text in STATELESS if "+rht" not in text])  # which bf16 cannot meet
def test_both_directions_at_once_have_the_bytes_of_each_alone(text):
    """And each is an operand of the product's kind."""
    section = {"input": "bf16", "weight": text, "grad_output": "bf16"}
    assert_trained_alike(linear(section), linear(section), batches=2, seed=3, step=2)


@pytest.mark.feature("F70")
@pytest.mark.parametrize(
    ("text", "single", "kernels", "splits"),
    crossed(SOME, [False, True], [False, True], [SPLITS, (ROWS // EXPERTS,) * EXPERTS], whole=("mxfp8", "nvfp4")),
)
def test_groups_are_made_at_once_as_the_products_take_them(text, single, kernels, splits, quantizations):
    """One call a step, with the bytes of a call for each direction."""
    row, _, column = text.partition("@")[0].partition("|")
    meets = {"input": row, "grad_output": column or row}  # torch._grouped_mm of a CPU takes two of one dtype
    meets = {tensor: "bf16|mxfp8" if it == "bf16" else "mxfp8" for tensor, it in meets.items()}
    options = {"single_grouped_weight": single, "plan_capability": GPU if kernels else None}
    cached, plain = (grouped(meets | {"weight": text}, **options) for _ in range(2))
    results = []
    for module, cache, expected in ((cached, True, [BOTH]), (plain, False, [["rowwise"], ["columnwise"]] * 2)):
        quantizations.clear()
        tensors = []
        for microbatch in range(2):
            x, dy = draw("normal", ROWS, K, microbatch).requires_grad_(), draw("normal", ROWS, N, microbatch)
            with quantization(seed=3, step=2, microbatch=microbatch, cache_weights=cache):
                y = module(x, splits)
                y.backward(dy)
            tensors += [y.detach(), x.grad]
        assert quantizations == expected
        results.append(tensors + [weight.grad for weight in module.weights])
    assert all(map(torch.equal, *results))


def test_columns_are_made_anew_where_a_product_takes_another_form():
    """By a GPU whose only kernel is that for equal experts, so that bits never depend on the call before."""
    cached, plain = (grouped("mxfp8", plan_capability=(8, 0)) for _ in range(2))
    results = []
    for module, cache in ((cached, True), (plain, False)):
        for splits in (SPLITS, (ROWS // EXPERTS,) * EXPERTS):
            x = draw("normal", ROWS, K).requires_grad_()
            with quantization(step=1, cache_weights=cache):
                module(x, splits).backward(draw("normal", ROWS, N))
            results.append(x.grad)
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


@pytest.mark.feature("F70")
def test_nothing_is_made_ahead_that_backward_will_not_ask_for(quantizations):
    """Backward asks for no columns in a first layer, without autograd, and where the scale depends on earlier steps."""
    with quantization(step=1, cache_weights=True):
        linear()(draw("normal", 32, 64)).sum().backward()
        with torch.no_grad():
            linear()(draw("normal", 32, 64).requires_grad_())
        assert quantizations == [["rowwise"], ["rowwise"]]
        quantizations.clear()
        train(linear("fp8_delayed"), 0)
    assert quantizations == [["rowwise"], ["columnwise"]]


def test_another_recipe_is_quantized_again(quantizations):
    module = linear()
    with quantization(step=1, cache_weights=True):
        train(module, 0)
        set_recipe(module, Recipe.from_config({"linear": "nvfp4"}))
        y, _ = train(module, 0)
    assert torch.equal(y, train(linear("nvfp4"), 0)[0])


def test_random_bits_are_those_of_the_step(quantizations):
    module = linear(SR)
    outputs = []
    for step in (1, 2, 2):
        with quantization(step=step, cache_weights=True):
            outputs.append(module(draw("normal", 32, 64)))
    assert not torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[1], outputs[2])
    assert quantizations.count(["rowwise"]) == 2


@pytest.mark.feature("F70")
def test_inference_then_training_and_no_operand_outlives_its_context(quantizations):
    module = linear()
    with quantization(step=1, cache_weights=True):
        with torch.no_grad():
            module(draw("normal", 32, 64))
        train(module, 0)
    assert quantizations == [["rowwise"], ["columnwise"]]
    module(draw("normal", 32, 64))
    assert len(module.workspace) == 0


def test_a_module_pickles_without_its_workspace():
    module = linear()
    with quantization(step=1, cache_weights=True):
        train(module, 0)
    assert len(module.workspace) == 2 and len(pickle.loads(pickle.dumps(module)).workspace) == 0


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "FusedAdam": lambda p: FusedAdam(p, lr=0.1),
    "FusedAdam fused": lambda p: FusedAdam(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("steps", [(1, 2, 3), (1, 1, 1)], ids=["steps", "within one step"])
@pytest.mark.parametrize("build", OPTIMIZERS)
def test_what_optimizers_write_is_seen(build, steps):
    """Torch's fused kernels do not count in a tensor's version that they wrote to it."""
    modules = [linear(), linear()]
    optimizers = [OPTIMIZERS[build](module.parameters()) for module in modules]
    for index, step in enumerate(steps):
        for module, optimizer, cached in zip(modules, optimizers, (True, False), strict=True):
            with quantization(step=step, cache_weights=cached):
                train(module, index)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(*(module.weight for module in modules))


def swap_in(p):
    """One row moved, and another one turned around in sign: all sums of the bits may stay what they are."""
    p.data[[0, 1]] = p.data[[1, 0]]


WRITES = {
    "data": lambda p: p.data.copy_(p.data * 3),
    "one element": lambda p: p.data.view(-1)[-1].mul_(3),
    "rows": swap_in,
    "signs": lambda p: p.data.neg_(),
    "set data": lambda p: setattr(p, "data", p.data * 3),
    "numpy": lambda p: p.detach().numpy().__imul__(3),
    "foreach": lambda p: torch._foreach_mul_([p.data], 3),
    "storage": lambda p: p.untyped_storage().copy_((p.detach() * 3).untyped_storage()),
    "set_": torch.no_grad()(lambda p: p.set_(p.detach() * 3)),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).mul_(3),
    "address": lambda p: ctypes.memset(p.data_ptr(), 0, p.nbytes // 2),
    "detached": lambda p: p.detach().mul_(3),
    "no_grad": torch.no_grad()(lambda p: p.mul_(3)),
    "inference": torch.inference_mode()(lambda p: p.data.mul_(3)),
}


@pytest.mark.parametrize(
    ("write", "kind", "when"),
    crossed(WRITES, ["linear", "converted", "grouped"], ["between calls", "before backward"], whole=list(WRITES)[:2]),
)
def test_any_write_within_a_step_is_seen(write, kind, when):
    """Also those that torch's version counter does not count."""
    cached, plain = (written_within_a_step(write, kind, when, cache_weights=cached) for cached in (True, False))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(cached, plain, strict=True))


def written_within_a_step(write, kind, when, **cache):
    """y of the last call, and dx."""
    module, x = written_modules(kind), draw("normal", ROWS, K).float().requires_grad_()
    splits = (SPLITS,) if kind == "grouped" else ()
    with quantization(step=1, **cache):
        y = module(x, *splits)
        for p in module.parameters():
            if p.dim() > 1:
                WRITES[write](p)
        if when == "between calls":
            before, y = y, module(x, *splits)
            assert not torch.equal(before, y)
        try:
            y.float().sum().backward()
        except RuntimeError as error:  # where torch counts the write, it refuses the graph
            assert when == "before backward" and "modified by an inplace operation" in str(error)
    return y.detach(), x.grad


def written_modules(kind):
    torch.manual_seed(0)
    if kind == "grouped":
        return grouped("mxfp8")
    if kind == "linear":
        return Linear(K, N, name="layer", recipe="mxfp8")
    module = torch.nn.Sequential(torch.nn.Linear(K, N))
    hqsweep.convert(module, "mxfp8")
    return module


def test_a_weight_with_nan_is_kept_and_another_nan_is_seen(quantizations):
    """They are compared as bits."""
    module, x = linear("bf16"), draw("normal", 32, 64)
    module.weight.data[0, 0] = torch.nan
    with quantization(step=1, cache_weights=True), torch.no_grad():
        module(x), module(x)
        assert len(quantizations) == 1
        module.weight.data[0, 0].neg_()
        module(x)
        assert len(quantizations) == 2


def test_nothing_is_compared_in_a_period_in_which_nobody_writes(quantizations, monkeypatch):
    """As the tool's own training has one for each step; another one makes everything anew."""
    module, periods = linear(), [object(), object()]
    monkeypatch.setattr(torch, "equal", None)
    for period in (periods[0], periods[0], periods[1]):
        with quantization(step=1, cache_weights=True), unwritten(period):
            train(module, 0)
    assert quantizations == [BOTH, BOTH] and not module.workspace._copies


def test_a_cache_without_a_step_is_refused():
    with pytest.raises(UserError, match="cache_weights keeps operands for one step of the training; pass step=, too"):
        quantization(cache_weights=True)


def test_an_update_within_one_step_is_seen_where_our_fused_optimizer_makes_it():
    module = linear()
    optimizer = FusedAdam(module.parameters(), lr=0.1, fused=True)
    x = draw("normal", 32, 64)
    with quantization(step=1, cache_weights=True):
        train(module, 1)
        optimizer.step()
        later = module(x)
    with quantization(step=1):
        assert torch.equal(later, module(x))


def test_an_update_of_shards_within_one_step_is_seen(quantizations, tmp_path):
    """fully_shard gathers the updated weight into a tensor of the same version, maybe where it was before."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        p = torch.nn.Parameter(distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)), [Shard(0)]))
        p.grad = p.detach().clone()
        module, x = linear(), draw("normal", 32, 64, 0)
        with quantization(step=1, cache_weights=True), torch.no_grad():
            module(x), module(x)
            assert len(quantizations) == 1
            FusedAdam([p]).step()
            module(x)
        assert len(quantizations) == 2
    finally:
        dist.destroy_process_group()
