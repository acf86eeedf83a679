"""Pairs of formats as the plans and refusals have them."""

import pytest

from hqsweep import formats
from hqsweep.gemm.pairs import FORMATS, products, reasons


def by_pair(capability):
    return {(p.a, p.b): p for p in products(capability)}


def test_every_name_is_there():
    assert {formats.words_of(text)[0] for text in FORMATS} == set(formats.NAMES)


def test_a_cpu_multiplies_exactly_whatever_may_meet():
    pairs = by_pair(None)
    assert len(pairs) == len(FORMATS) * (len(FORMATS) + 1) // 2
    assert pairs["mxfp8", "nvfp4"].mode == "exact" and pairs["mxfp8", "nvfp4"].exact.startswith("exact: bf16 operands")
    assert pairs["mxfp8", "mxfp8"].mode == "strict" and "needs a GPU" in pairs["mxfp8", "mxfp8"].native_fault
    assert pairs["bf16", "bf16"].mode == "native" and pairs["nvfp4", "nvfp4+rht"].mode == "none"
    assert pairs["fp8_block+fp32_scale", "fp8_block+fp32_scale"].exact.startswith("exact: fp32 operands")


@pytest.mark.parametrize(
    ("capability", "native"),
    [((8, 0), set()), ((8, 9), {"fp8_current"}), ((9, 0), {"fp8_current", "fp8_block"}), ((12, 0), set()),
     ((10, 0), {"fp8_current", "mxfp8", "nvfp4"})],
)  # fmt: skip
def test_tensor_cores_by_capability(capability, native):
    pairs = by_pair(capability)
    low = ("fp8_current", "fp8_block", "mxfp8", "nvfp4", "mxfp4")
    assert {name for name in low if pairs[name, name].mode == "native"} == native
    assert pairs["mxfp8", "mxfp8"].native_on == ("sm_100",) == pairs["mxfp8", "mxfp8"].untried
    assert pairs["fp8_current+e5m2", "fp8_current+e5m2"].native_on == ()


def test_every_pair_has_one_reason_to_stop():
    rows = products((9, 0))
    assert sum(row["pairs"] for row in reasons(rows)) == sum(p.mode != "native" for p in rows)
    assert any("E5M2 does not meet E5M2" in row["reason"] for row in reasons(rows))
