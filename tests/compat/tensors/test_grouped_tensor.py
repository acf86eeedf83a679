"""GroupedTensor by TransformerEngine's name: shapes, memory and members."""

import pytest
import torch

from hqsweep import compat
from hqsweep.compat import DType, GroupedTensor
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.quant import GroupedTensor as Held
from hqsweep.quant import HybridQuantizer

E4M3 = DType.kFloat8E4M3
SAME, ROWS, COLUMNS, ALL = (
    [(128, 256)] * 2, [(128, 256), (256, 256)], [(128, 128), (128, 256)], [(128, 256), (256, 128)]
)  # fmt: skip
QUANTIZERS = {
    "scaled": lambda: compat.Float8Quantizer(torch.full((1,), 2.0), torch.zeros(1), E4M3),
    "current": lambda: compat.Float8CurrentScalingQuantizer(E4M3, columnwise=False),
    "block": lambda: compat.Float8BlockQuantizer(E4M3, columnwise=False, block_scaling_dim=1),
    "mxfp8": lambda: compat.MXFP8Quantizer(E4M3),
    "nvfp4": compat.NVFP4Quantizer,
}


def made(shapes, quantizer=None, **options):
    return GroupedTensor.make_grouped_tensor_with_shapes(len(shapes), shapes, quantizer, "cpu", **options)


@pytest.mark.parametrize(
    ("shapes", "logical", "same"),
    [
        (SAME, (256, 256), (True, True, True)),
        (ROWS, (384, 256), (False, False, True)),
        (COLUMNS, (128, 384), (False, True, False)),
        (ALL, (1, 65536), (False, False, False)),
    ],
)
def test_a_group_knows_what_its_members_share(shapes, logical, same):
    group = made(shapes)
    assert group.logical_shape == logical and (group.num_tensors, group.tensor_shapes) == (2, shapes)
    assert (group.all_same_shape(), group.all_same_first_dim(), group.all_same_last_dim()) == same
    for common, axis in ((group.get_common_first_dim, 0), (group.get_common_last_dim, 1)):
        if same[1 + axis]:
            assert common() == shapes[0][axis]
        else:
            with pytest.raises(UserError, match=r"its 2 members have \[128, 256\] (rows|columns)"):
                common()


def test_members_of_a_plain_group_are_views():
    group = made(ALL, dtype=torch.bfloat16)
    for number, member in enumerate(group.split_into_quantized_tensors()):
        member.fill_(number)
    assert group.rowwise_data.dtype is torch.bfloat16 and group.rowwise_data.sum() == 256 * 128
    assert group.columnwise_data is group.scale_inv is group.scale is None
    with pytest.raises(UserError, match="a group without a quantizer"):
        group.quantize([torch.zeros(shape) for shape in ALL])


@pytest.mark.parametrize("shapes", [SAME, ROWS])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantize_writes_every_member_in_the_memory_of_the_group(name, shapes):
    quantizer, tensors = QUANTIZERS[name](), [draw("heavy", *shape, seed) for seed, shape in enumerate(shapes)]
    group = made(shapes, quantizer, dtype=torch.bfloat16)
    codes, scales = group.rowwise_data, group.scale_inv
    members, start = group.quantize(tensors), 0
    for member, tensor in zip(members, tensors, strict=True):
        alone = quantizer(tensor)
        assert torch.equal(member.dequantize(), alone.dequantize())
        assert member._rowwise_data.data_ptr() == codes.data_ptr() + start
        start += alone._rowwise_data.numel()
        if quantizer.columnwise_usage:
            assert torch.equal(member._columnwise_data, alone._columnwise_data)
    assert group.rowwise_data is codes and group.scale_inv is scales
    assert (group.columnwise_data is None) is (group.columnwise_scale_inv is None) is not quantizer.columnwise_usage
    assert (group.scale is None) is (name != "scaled")
    group.clear()
    assert not group.has_data() and (group.num_tensors, group.logical_shape) == (0, (0, 0))
    assert group.rowwise_data is None and group.split_into_quantized_tensors() == []


def test_the_tensors_of_experts_are_a_group():
    held = Held.quantize(torch.ones(2, 64, 64), HybridQuantizer.parse("mxfp8"))
    assert isinstance(held, GroupedTensor) and isinstance(made(SAME), GroupedTensor)
    assert not isinstance(held.members[0], GroupedTensor)


def test_there_is_one_tensor_for_each_member():
    with pytest.raises(UserError, match="2 shapes for 3 tensors"):
        GroupedTensor.make_grouped_tensor_with_shapes(3, SAME)
    with pytest.raises(UserError, match="1 tensors for 2 members"):
        made(SAME, compat.MXFP8Quantizer(E4M3)).quantize([torch.ones(128, 256)])
