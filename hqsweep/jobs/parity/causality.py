"""Check `causality` of the parity job: does a later token change what earlier tokens computed?

A scale that several tokens share carries the largest of them back to all others, so that a causal model sees its
future (Composer 2, arXiv 2603.24477, section 6.1, names it for NVFP4's scale of the tensor). The last token of a
sequence is made larger and nothing else changes. Formats whose scales belong to one row must give every earlier token
the same bytes; formats that share a scale among rows, per tensor or per tile, must be seen to leak.
"""

import torch
from torch import Tensor

from hqsweep.config.job import ParityConfig
from hqsweep.formats import Format, RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.jobs.parity.compare_bytes import Check, Rows, named_pairs, row
from hqsweep.nn import Linear
from hqsweep.ops.stats import output_error
from hqsweep.quant.hybrid import HybridQuantizer

TOKENS, WIDTH, OUTPUTS = 64, 128, 96
GROWTH = 3.0
"""The largest magnitude of the new last token over that of all tokens before: a power of two would shift scales and
hide the leak."""
KEY = RngKey(seed=1, slot="causality", step=3)


def causality_check(config: ParityConfig, device: torch.device) -> Rows:
    """Each format on the input of a Linear: what quantization makes of earlier tokens, and their outputs."""
    before = draw("heavy", TOKENS, WIDTH, config.seed).clamp(-1e3, 1e3).to(device)
    after = before.clone()
    after[-1] = GROWTH * before.abs().max()
    for text in config.parity.formats:
        format = parse(text).rowwise_form
        expected, actual = (_earlier(format, x, config.seed) for x in (before, after))
        for case in expected:
            yield _verdict(text, case, shares_scales(format), expected[case], actual[case])


def shares_scales(format: Format) -> bool:
    """Whether a scale of the format stands for elements of more than one row."""
    return any(buffer.rows != 1 for buffer in format.layout.values())


def _earlier(format: Format, x: Tensor, seed: int) -> dict[str, Tensor]:
    """Values of all tokens but the last: those that the operand stands for, and y of a Linear with a bf16 weight."""
    operand = HybridQuantizer(format, parse("bf16")).quantize(x, columnwise=None, key=KEY).rowwise
    quantizers = {"input": f"{format}|bf16", "weight": "bf16", "grad_output": "bf16"}
    module = Linear(WIDTH, OUTPUTS, name="causality", recipe=quantizers)
    module = module.to(x.device)
    with torch.no_grad():
        module.weight.copy_(draw("normal", OUTPUTS, WIDTH, seed))
        return {"operand": operand.dequantize()[:-1], "outputs of a Linear": module(x)[:-1]}


def _verdict(subject: str, case: str, leaks: bool, expected: Tensor, actual: Tensor) -> dict[str, object]:
    """A comparison of bytes; for a format that must leak, PASS when bytes differ, with how many and by how much."""
    compared = row("causality", subject, case, named_pairs({"earlier tokens": expected}, {"earlier tokens": actual}))
    if not leaks:
        return compared | {"note": "expected: no leak, each row has its own scales"}
    changed, total = compared["mismatches"], compared["total"]
    error = output_error(expected.float(), actual.float())["rel_l2"]
    note = f"expected: leak, rows share scales; {100 * changed / total:.1f} % of values change, relative L2 {error:.1e}"
    status = "PASS" if changed else "FAIL"
    return row("causality", subject, case, {}) | {"status": status, "total": total, "note": note}


CAUSALITY_CHECKS: dict[str, Check] = {"causality": causality_check}
