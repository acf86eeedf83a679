"""The fixed computation gives the committed hash by the reference, by every instruction set and on the GPU."""

import pytest
import torch
from support.fuzz import instruction_sets

from hqsweep.formats import NAMES, options, parse, words_of
from hqsweep.formats.spec import FINGERPRINT
from hqsweep.ops import fingerprint as module
from hqsweep.ops.fingerprint import FORMATS, fingerprint, wide_range


def test_reference():
    assert fingerprint(backend="reference") == FINGERPRINT


@pytest.mark.parametrize("isa", instruction_sets.available())
def test_cpu_kernels(isa, monkeypatch):
    instruction_sets.use(monkeypatch, isa)
    assert fingerprint(backend="kernel") == FINGERPRINT


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "kernel"])
def test_gpu(backend):
    assert fingerprint("cuda", backend) == FINGERPRINT


NEWER = {"fp8_row", "int8_row", "int8_block", "nvfp4+ue5m3"}
NEWER_OPTIONS = {"ceil", "e1m2", "rht32", "rht64", "rht128", "eden"}
"""What came after the hash, which the manifests of earlier runs have: tests of their bytes stand in its place."""


def test_every_format_and_option_takes_part():
    without = {"bf16", "fp16", "fp32", "fp8_delayed"} | NEWER  # no kernel, or the kernel of fp8_current
    assert {words_of(text)[0] for text in FORMATS} == set(NAMES) - without
    taken = {option for text in FORMATS for option in words_of(text)[1]}
    offered = {option for name in set(NAMES) - without for option in options(name)}
    assert offered - taken == {"nosign", "max448"} | NEWER_OPTIONS, "an option takes no part"
    assert all(str(parse(text)) == text for text in FORMATS)


def test_input_reaches_both_ends():
    x = wide_range(3)
    assert (x == 0).sum() > 100 and ((x != 0) & (x.abs() < 2.0**-126)).sum() > 100 and x.abs().max() > 2.0**60


@pytest.mark.parametrize("backend", ["reference", "kernel"])
def test_flushed_subnormals_change_the_hash(backend):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert fingerprint(backend=backend) != FINGERPRINT
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("text", FORMATS)
def test_one_other_bit_changes_the_hash(text, monkeypatch):
    real = module.quantize

    def broken(x, rowwise, columnwise, **options):
        operands = real(x, rowwise, columnwise, **options)
        if str(rowwise.format) == text and rowwise.output == "codes":
            operands.rowwise["q"][-1, -1] ^= 1
        return operands

    monkeypatch.setattr(module, "quantize", broken)
    assert fingerprint() != FINGERPRINT
