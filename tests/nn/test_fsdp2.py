"""fully_shard on one rank: weights in high precision train as without it; those that are held are cut in any way."""

import pytest
import torch
import torch.distributed as dist
from cases import BY_STEP
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import GroupedLinear, GroupedLinearOptions, Linear, quantization, quantized_model_init
from hqsweep.nn.core.call import LinearCall
from hqsweep.nn.saved_memory import ActivationOffload
from hqsweep.optim import FusedAdam
from hqsweep.parallel.data import gather_in_linear_dtype
from hqsweep.parallel.tensor import ColwiseLinear, fsdp_placement, shard_placement
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer
from hqsweep.recipe import LinearQuantizers, Recipe

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def linear(text):
    torch.manual_seed(0)
    return Linear(64, 96, name="l", recipe=LinearQuantizers.parse(text, "test"))


def experts(text):
    options = GroupedLinearOptions(single_grouped_weight=True)
    return GroupedLinear(2, 64, 96, name="e", recipe=Recipe.from_config({"linear": text}), options=options)


@pytest.mark.feature("H8")
@pytest.mark.parametrize("dim", [1, 2])
def test_held_experts_of_one_rank_may_be_cut_along_any_axis(mesh, dim):
    with quantized_model_init():
        module = experts("mxfp8")
    x = draw("normal", 64, 64)
    y = module(x, [32, 32])
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
    assert torch.equal(module(x, [32, 32]), y)


@pytest.mark.feature("H8")
@pytest.mark.parametrize("held", [False, True])
def test_pieces_are_cut_along_columns_where_ranks_divide_them(mesh, held):
    """torch cuts rows evenly or not, and columns evenly alone."""
    ranks = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    with quantized_model_init(enabled=held):
        qkv = Linear(64, 96, name="l", recipe=LinearQuantizers.parse("mxfp8", "test"), bias=True)
    y = qkv(draw("normal", 32, 64))
    parallelize_module(qkv, ranks["tp"], ColwiseLinear(pieces=3))
    assert [fsdp_placement(p) for p in (qkv.weight, qkv.bias)] == [Shard(1), None]
    assert [shard_placement(qkv.weight, ranks=count) for count in (4, 3)] == [Shard(1), None]
    fully_shard(qkv, mesh=ranks["dp"], shard_placement_fn=fsdp_placement)
    assert torch.equal(qkv(draw("normal", 32, 64)), y)


def test_what_torch_has_not_cut_is_not_gathered():
    whole = HybridQuantizedTensor.quantize(torch.ones(4, 32), HybridQuantizer.parse("mxfp8"))
    with pytest.raises(UserError, match="the weight held in mxfp8 is no part that torch has cut"):
        whole.fsdp_pre_all_gather(object(), whole.shape, whole.stride(), None, None)


@pytest.mark.parametrize("text", ["nvfp4|mxfp8", "fp8_block+2d", "fp8_current", "bf16"])
def test_without_a_mesh_the_hooks_give_a_whole_its_buffers_back(text):
    whole = HybridQuantizedTensor.quantize(draw("heavy", 64, 128), HybridQuantizer.parse(text))
    asked = dict.fromkeys(("mesh", "orig_size", "contiguous_orig_stride", "module", "mp_policy"))
    buffers, told = whole.fsdp_pre_all_gather(**asked)
    received = [buffer.clone() for buffer in buffers]
    again, outputs = whole.fsdp_post_all_gather(received, told, torch.float32)
    assert outputs is received and again.dtype is torch.float32
    assert torch.equal(again.dequantize(), whole.dequantize(torch.float32))
    whole.quantize_(3 * draw("normal", 64, 128))
    buffers, told = whole.fsdp_pre_all_gather(**asked)
    filled, _ = whole.fsdp_post_all_gather(buffers, told, torch.float32, out=again)
    assert filled is again and torch.equal(again.dequantize(), whole.dequantize(torch.float32))


def test_a_held_matrix_of_three_axes_is_not_cut_along_the_middle_one(mesh):
    module = nn.Module()
    module.weight = nn.Parameter(HybridQuantizedTensor.quantize(torch.ones(2, 4, 32), HybridQuantizer.parse("mxfp8")))
    with pytest.raises(
        UserError, match=r"slice along axis 1 of a quantized tensor of shape \(2, 4, 32\); its first and"
    ):
        fully_shard(module, mesh=mesh, shard_placement_fn=lambda _: Shard(1))


def test_a_held_weight_of_one_rank_may_be_cut_along_columns(mesh):
    with quantized_model_init():
        module = linear("mxfp8")
    y = module(draw("normal", 32, 64))
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    assert torch.equal(module(draw("normal", 32, 64)), y)


@pytest.mark.parametrize("text", BY_STEP)
def test_plain_weights_train_as_without(text, mesh):
    losses = []
    for sharded in (False, True):
        model = nn.Sequential(linear(text))
        if sharded:
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        for step in (1, 2, 3):
            with quantization(step=step):
                loss = (model(draw("normal", 32, 64, step)).float() - 1).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


@pytest.mark.feature("F123", "F161")
def test_offloading_leaves_alone_what_is_gathered(mesh):
    """From the first forward on, which makes that memory: only inputs leave, as of parameters that are not sharded."""
    waiting = {}
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(2)), linear("mxfp8"))
        for block in model if sharded else ():
            fully_shard(block, mesh=mesh)
        if sharded:
            fully_shard(model, mesh=mesh)
            gather_in_linear_dtype(model)
        away = ActivationOffload(model, min_bytes=1)
        for step in (1, 2):
            if sharded:
                model[2].unshard()  # as an evaluation leaves it that shards nothing again
            with away.saving(), quantization(step=step):
                y = model(draw("normal", 32, 64, step).float().requires_grad_())
            waiting[sharded, step] = away.host_bytes
            y.float().square().mean().backward()
        waiting[sharded] = [p.grad.full_tensor() if sharded else p.grad for p in model.parameters()]
    assert waiting[False, 1] == waiting[True, 1] == waiting[True, 2] > 0
    assert all(torch.equal(a, b) for a, b in zip(waiting[False], waiting[True], strict=True))


def test_views_of_one_gathered_weight_have_operands_of_their_own(mesh):
    module = fully_shard(linear("mxfp8"), mesh=mesh, reshard_after_forward=False)
    gather_in_linear_dtype(module)
    module.unshard()
    call, halves = LinearCall(**module.linear_facts()), module.weight.split(48)
    for half in halves:
        call.weight([half], "rowwise", needs_dx=True)
    for half, whole in zip(halves, linear("mxfp8").weight.split(48), strict=True):
        expected = call.quantize("weight", whole.bfloat16(), columnwise="codes").columnwise
        columns = call.weight([half], "columnwise")
        assert torch.equal(columns.operand().matrix, expected.operand().matrix)
