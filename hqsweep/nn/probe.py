"""Probe: collects error statistics of every tensor, direction and GEMM while one training step runs."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hqsweep.formats import RngKey
from hqsweep.ops.stats import finite_or_none, output_error
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.roles import TENSOR_TYPES
from hqsweep.track.tables import ERRORS, LOADS

SLOTS = TENSOR_TYPES["linear"]
ROUTED = "routed"
"""`tensor` of the rows that say how many tokens an expert got."""


class Probe:
    """Rows of one sampled step. `gemms` also compares each product with the one of unquantized FP32 tensors.

    What reports again under a name that has rows already is passed over: a forward that is computed again in backward
    (the rows are those without recomputation), and further microbatches of the step.
    originals: layer name -> the high-precision weight that a quantized one was made from, such as its FP32 master.
    capture: also keep the operands of linears [rows, cols] themselves, in CPU memory, as "LAYER.input", "LAYER.weight"
    and "LAYER.grad_output" in `captured`.
    """

    def __init__(
        self, step: int, *, gemms: bool = True, originals: Mapping[str, Tensor] | None = None, capture: bool = False
    ) -> None:
        self.step = step
        self.originals = originals or {}
        self.gemms = gemms
        self.capture = capture
        self.captured: dict[str, Tensor] = {}
        self.rows: list[dict[str, object]] = []
        self._reported: set[tuple[str, str]] = set()

    def tensor(
        self, layer: str, tensor: str, x: Tensor, quantizer: HybridQuantizer, key: RngKey, states: SlotStates | None
    ) -> None:
        """Both directions of x [rows, cols], quantized again as the module quantizes it.

        Errors are against the original values, also with columnwise_source rowwise_dequantized.
        """
        if self._is_first(layer, tensor):
            for direction, values in quantizer.statistics(x.detach(), key, states).items():
                self._add(layer, tensor, direction, str(getattr(quantizer, direction)), values)
            if self.capture and tensor in SLOTS:
                self.captured[f"{layer}.{tensor}"] = x.detach().to("cpu", copy=True).contiguous()

    def gemm(self, layer: str, gemm: str, a: Tensor, b: Tensor, actual: Tensor) -> None:
        """actual [m, n] against a [m, k] @ b [n, k].T of the unquantized tensors in FP32."""
        if self.gemms and self._is_first(layer, gemm):
            expected = a.detach().float() @ b.detach().float().t()
            self._add(layer, gemm, "output", None, output_error(expected, actual.detach()))

    def experts(self, layer: str, tokens: Sequence[int]) -> None:
        """A row for each expert of a mixture, "LAYER.0" and so on: its tokens, and its load, which is that over the
        mean of all."""
        if self._is_first(layer, ROUTED):
            mean = sum(tokens) / len(tokens)
            for expert, count in enumerate(tokens):
                values = {"tokens": float(count), "load": count / mean if mean else None}
                self._add(f"{layer}.{expert}", ROUTED, "output", None, values)

    def _is_first(self, layer: str, name: str) -> bool:
        known = (layer, name) in self._reported
        self._reported.add((layer, name))
        return not known

    def _add(
        self, layer: str, tensor: str, direction: str, format: str | None, values: Mapping[str, float | None]
    ) -> None:
        row = {"step": self.step, "layer": layer, "tensor": tensor, "direction": direction, "format": format}
        self.rows.append(row | dict.fromkeys((*ERRORS, *LOADS)) | finite_or_none(values))
