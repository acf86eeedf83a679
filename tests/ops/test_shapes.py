"""Shapes: members of any shapes in a flat buffer, and the narrower matrix that their rows may be."""

import pytest
import torch

from hqsweep.errors import UserError
from hqsweep.formats import parse
from hqsweep.ops.layout import GroupLayout, Shapes, ShapesLayout


def test_members_follow_each_other_and_leave_the_rest_alone():
    shapes, flat = Shapes.of([(2, 3), (0, 5), torch.Size([4, 1])]), torch.arange(13)
    assert (shapes.count, shapes.total, shapes.sizes) == (3, 10, [6, 0, 4])
    parts = shapes.parts(flat)
    assert [tuple(part.shape) for part in parts] == [(2, 3), (0, 5), (4, 1)]
    assert torch.equal(torch.cat([part.flatten() for part in parts]), flat[:10])
    assert parts[2].data_ptr() == flat[6:].data_ptr()
    assert shapes == Shapes.of([[2, 3], [0, 5], [4, 1]]) and len({shapes, Shapes.of(shapes.members)}) == 1


def test_members_of_one_width_are_the_rows_of_a_matrix():
    shapes = Shapes.of([(2, 3), (0, 3), (4, 3)])
    layout = shapes.layout(columnwise=True)
    assert shapes.width == 3 and shapes.equal is None and shapes.splits.sizes == (2, 0, 4)
    assert isinstance(layout, GroupLayout) and layout.shapes == [(3, 2), (3, 0), (3, 4)]
    assert Shapes.of([(2, 3)] * 2).equal == (2, 3)
    other = Shapes.of([(2, 3), (3, 2)]).layout(columnwise=True)
    assert isinstance(other, ShapesLayout) and other.shapes == [(3, 2), (2, 3)]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [([(2, 3), (4,)], r"member 1 .* has the shape \[4\]"), ([(2, -3)], r"\[2, -3\]"), ([], "one member or more")],
)
def test_what_is_no_shape_is_refused(shapes, message):
    with pytest.raises(UserError, match=message):
        Shapes.of(shapes)


@pytest.mark.parametrize(
    ("text", "shapes", "expected"),
    [
        ("mxfp8", [(2, 96), (3, 64)], (64, (3, 3))),
        ("mxfp8", [(2, 96), (3, 80)], None),
        ("mxfp8", [(2, 128), (0, 192), (3, 256)], (256, (1, 0, 3))),
        ("mxfp8", [(128, 128), (64, 256)], (4096, (4, 4))),
        ("mxfp8", [(2, 96), (0, 8)], None),
        ("mxfp8+2d", [(32, 96), (32, 64)], None),
        ("fp8_block", [(2, 384), (3, 256)], (256, (3, 3))),
        ("fp8_block", [(4, 96), (2, 256)], None),
        ("fp8_block+2d", [(128, 384), (128, 256)], None),
        ("nvfp4", [(2, 96), (3, 64)], (64, (3, 3))),
        ("nvfp4", [(2, 24), (3, 16)], None),
        ("nvfp4+row_scaled", [(2, 96), (3, 64)], None),
        ("fp8_current", [(2, 5), (3, 7)], (1, (10, 21))),
        ("bf16", [(2, 6), (4, 9)], (4, (3, 9))),
        ("fp8_current", [(2, 0), (0, 3)], (4096, (0, 0))),
    ],
)
def test_rows_are_those_of_a_narrower_matrix_where_blocks_fill_them(text, shapes, expected):
    folded = Shapes.of(shapes).folded(parse(text))
    assert (folded and (folded[0], folded[1].sizes)) == expected


def test_the_one_that_differs_is_named():
    layout = Shapes.of([(2, 3), (4, 3), (2, 5)]).layout(columnwise=False)
    message = r"^a grouped product takes members of one width, and member 2 is \[2, 5\], member 0 \[2, 3\]$"
    with pytest.raises(UserError, match=message):
        _ = layout.splits
