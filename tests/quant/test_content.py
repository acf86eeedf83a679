"""What a tensor encodes, one matrix or many, answers the same questions, and stands in files as before."""

import pytest
import torch

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer
from hqsweep.quant.content import ManyMatrices, OneMatrix
from hqsweep.quant.usage import Metadata

KEY = RngKey(seed=1, slot="w", step=2)
ALIKE, UNLIKE = (3, 32, 64), [(32, 64), (64, 32)]


@pytest.mark.parametrize(
    ("kind", "shape", "logical", "matrix"),
    [
        (OneMatrix, (2, 32, 64), (2, 32, 64), (64, 64)),
        (ManyMatrices, ALIKE, ALIKE, (96, 64)),
        (ManyMatrices, [(32, 64)] * 3, ALIKE, (96, 64)),
        (ManyMatrices, UNLIKE, (4096,), (1, 4096)),
    ],
)
def test_metadata_in_text_is_parsed_to_an_equal_value(kind, shape, logical, matrix):
    content, got = kind.of(shape)
    metadata = Metadata.of(content, HybridQuantizer.parse("nvfp4+sr|mxfp8"), key=KEY)
    described = metadata.describe()
    assert tuple(got) == logical and metadata.matrix == matrix and described["matrix"] == list(matrix)
    again = Metadata.parse(described)
    assert again == metadata and hash(again) == hash(metadata)
    assert ("experts" in described) == (kind is ManyMatrices) and ("shapes" in described) == (shape is UNLIKE)


def test_a_member_has_the_buffers_and_the_stream_of_its_own_matrix():
    content, _ = ManyMatrices.of(UNLIKE)
    metadata = Metadata.of(content, HybridQuantizer.parse("nvfp4+sr"), key=KEY)
    members = [metadata.member(index) for index in range(content.count)]
    assert [member.matrix for member in members] == UNLIKE
    assert [member.key.slot for member in members] == ["w/0", "w/1"]
    for direction, name in metadata.stored:
        dtype, (entries,) = metadata.buffer(direction, name)
        own = [member.buffer(direction, name) for member in members]
        assert {dtype} == {kind for kind, _ in own}
        assert entries == sum(torch.Size(shape).numel() for _, shape in own)


def test_what_can_be_held_alike_is_told_by_shape():
    one, alike, unlike = OneMatrix.of((32, 64))[0], ManyMatrices.of(ALIKE)[0], ManyMatrices.of(UNLIKE)[0]
    assert one.empty_shape((4, 8)) == (4, 8) and one.empty_shape((8,)) is None
    assert alike.empty_shape((2, 4, 8)) == (2, 4, 8) and alike.empty_shape((4, 8)) is None
    assert list(unlike.empty_shape((4096,))) == UNLIKE and unlike.empty_shape((4095,)) is None
    assert len({one.extent, alike.extent, unlike.extent}) == 3


def test_one_matrix_is_not_written_from_many_tensors():
    w = HybridQuantizedTensor.empty((32, 64), HybridQuantizer.parse("mxfp8"))
    with pytest.raises(UserError, match=r"quantize_: got 2 tensors for one matrix \[32, 64\]; give one tensor"):
        w.quantize_([torch.zeros(16, 64)] * 2)


def test_shapes_that_no_format_holds_are_refused_with_the_member():
    with pytest.raises(UserError, match=r"^expert 1: "):
        ManyMatrices.of([(32, 64), (32, 8)])[0].check(parse("nvfp4"), "rowwise")
    with pytest.raises(UserError, match="experts, rows, columns"):
        ManyMatrices.of((32, 64))


def test_fewer_axes_are_one_row():
    assert [OneMatrix.of(shape)[0].matrix for shape in ((), (7,), (2, 3, 7))] == [(1, 1), (1, 7), (6, 7)]
