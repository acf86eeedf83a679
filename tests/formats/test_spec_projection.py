"""Texts of projections: what they are split into, and which grids and hosts are refused, in a sentence."""

import pytest

from hqsweep.errors import UserError
from hqsweep.formats.spec import check_projection, projection_text, split_projection


@pytest.mark.parametrize(
    ("value", "grid", "host"),
    [
        ("project(mxfp4) > mxfp8", "mxfp4", "mxfp8"),
        (" project( nvfp4+2d )>mxfp8|fp8_block@rowwise_dequantized", "nvfp4+2d",
         "mxfp8|fp8_block@rowwise_dequantized"),
        ("nvfp4|mxfp8", None, "nvfp4|mxfp8"),
        ({"rowwise": "mxfp8", "columnwise": "mxfp8", "project": "mxfp4"}, "mxfp4",
         {"rowwise": "mxfp8", "columnwise": "mxfp8"}),
        ({"rowwise": "mxfp8", "columnwise": "mxfp8", "project": None}, None,
         {"rowwise": "mxfp8", "columnwise": "mxfp8"}),
        ({"rowwise": "mxfp8"}, None, {"rowwise": "mxfp8"}),
    ],
)  # fmt: skip
def test_a_projection_is_its_grid_and_its_host(value, grid, host):
    assert split_projection(value) == (grid, host)


def test_the_joined_text_is_split_again():
    assert split_projection(projection_text("mxfp6_e2m3", "fp8_block+2d")) == ("mxfp6_e2m3", "fp8_block+2d")


@pytest.mark.parametrize("text", ["project(mxfp4)", "project mxfp4 > mxfp8", "project(mxfp4) mxfp8", "projects"])
def test_half_a_projection_is_refused(text):
    with pytest.raises(UserError, match=r"a projection is project\(GRID\) > QUANTIZER, as in 'project\(mxfp4\) > mx"):
        split_projection(text)


@pytest.mark.parametrize("grid", ["mxfp4+floor", "mxfp4+e1m2", "mxfp6_e3m2", "nvfp4+4over6", "nvfp4+2d"])
@pytest.mark.parametrize("host", ["mxfp8", "mxfp8+e5m2+2d", "fp8_block", "fp8_block+2d+pow2"])
def test_narrower_grids_on_hosts_with_powers_of_two_pass(grid, host):
    check_projection(grid, (host, "mxfp8"))


@pytest.mark.parametrize(
    ("grid", "host", "sentence"),
    [
        ("mxfp8", "mxfp8", "mxfp8 is no grid that is narrower than its hosts; it takes mxfp4, mxfp6_e2m3"),
        ("bf16", "mxfp8", "bf16 is no grid"),
        ("nvfp4+tensor", "mxfp8", r"nvfp4\+tensor is no grid"),
        ("mxfp4+sr", "mxfp8", r"project\(mxfp4\+sr\): drop \+sr: its values are drawn anew"),
        ("nvfp4+rht", "mxfp8", r"drop \+rht: its values are transformed"),
        ("nvfp4+row_scaled", "mxfp8", r"drop \+row_scaled"),
        ("mxpf4", "mxfp8", "unknown name 'mxpf4'"),
        ("mxfp4", "nvfp4", r"project\(mxfp4\) > nvfp4: a host is mxfp8 or fp8_block, in both directions"),
        ("mxfp4", "bf16", "> bf16: a host is mxfp8 or fp8_block"),
        ("mxfp4", "fp8_block+fp32_scale", "with scales that are powers of two"),
    ],
)
def test_other_grids_and_hosts_are_refused(grid, host, sentence):
    with pytest.raises(UserError, match=sentence):
        check_projection(grid, ("mxfp8", host))
