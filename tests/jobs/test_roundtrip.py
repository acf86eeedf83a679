"""The check `roundtrip` says which formats are idempotent, and finds a kernel whose second trip differs."""

import pytest
import torch

from hqsweep.config.job import parse
from hqsweep.jobs.parity import roundtrip

SECTION = {"distributions": ["normal", "heavy", "row_scaled", "ties"], "shapes": [[64, 96]], "checks": ["roundtrip"]}


def rows(*formats: str) -> dict[str, dict]:
    section = SECTION | {"formats": list(formats)}
    config = parse({"job": "parity", "sweep": "p", "parity": section})
    return {row["subject"]: row for row in roundtrip.roundtrip_check(config, torch.device("cpu"))}


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("bf16", "idempotent: equal bytes"),
        ("fp8_current", "idempotent: equal bytes"),
        ("mxfp8+floor", "idempotent: equal bytes"),
        ("mxfp8", "idempotent: equal values, other codes and scales"),
        ("mxfp4", "idempotent: equal values, other codes and scales"),
        ("nvfp4", "not idempotent: other values, "),
    ],
)
def test_a_row_says_what_a_second_trip_changes(text, note):
    row = rows(text)[text]
    assert row["status"] == "PASS" and row["note"].startswith(note) and row["total"] > 0


def test_a_block_whose_maximum_is_at_most_half_the_ceiling_is_why_mxfp8_takes_another_scale():
    """One block by hand: 448 / 1.75 rounds the scale up, so the stored maximum is 256 = 448 / 1.75 of the range."""
    x = torch.zeros(128, 256)
    x[:, 0] = 449.0
    first, second = roundtrip._trip(x, roundtrip.parse("mxfp8"), "reference")
    assert first["s"][0, 0] == 128 and second["s"][0, 0] == 127
    assert roundtrip._told(first, second, roundtrip.parse("mxfp8"))[1].startswith("idempotent: equal values")


def test_a_transform_is_not_undone_by_decoding_and_is_left_out():
    assert rows("nvfp4+rht")["nvfp4+rht"]["status"] == "SKIP"


def test_another_second_code_is_found(monkeypatch):
    real = roundtrip.encode

    def wrong(x, format, *, key, backend):
        codes = real(x, format, key=key, backend=backend)
        if backend == "auto" and x.dtype is torch.float32:
            codes["q"] = codes["q"] ^ 1
        return codes

    monkeypatch.setattr(roundtrip, "encode", wrong)
    assert rows("mxfp8")["mxfp8"]["status"] == "FAIL"
