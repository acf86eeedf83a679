"""Probe: error statistics of every tensor, direction and GEMM in one training step.

A row covers everything that a step puts through one slot. The tensors of all microbatches count as one matrix, each
quantized by itself. The same holds for outputs of a GEMM; for wgrad, a row has the errors of each microbatch's product,
not of their sum. Weights are the same in every microbatch and count once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.config.jobs import ERRORS, LOADS, PROJECTED
from hqsweep.formats import RngKey, parse
from hqsweep.nn.core.wire import Part
from hqsweep.ops.stats import OutputSums, Sums, finite_or_none, is_below, output_sums
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.roles import TENSOR_TYPES

SLOTS = TENSOR_TYPES["linear"]
ROUTED = "routed"
"""The `tensor` of rows with an expert's token count."""


class Key(NamedTuple):
    """The name of a row."""

    layer: str
    name: str
    """The tensor or GEMM."""
    direction: str
    what_if: str | None = None
    """The format of a row of the table "what_if"."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The source of a report: a tensor, or a product, of one call."""

    layer: str
    name: str
    microbatch: int = 0
    part: Part | None = None
    """The tensor's part of a matrix that ranks share; None: it is the whole."""


@dataclass(frozen=True)
class Tokens:
    """The token count of an expert, and of all experts of its mixture."""

    own: int
    total: int
    experts: int

    def joined(self, other: "Tokens", *, below: bool = True) -> "Tokens":
        """Return the tokens of this call and another one."""
        return Tokens(self.own + other.own, self.total + other.total, self.experts)

    def to(self, device: torch.device | str) -> "Tokens":
        """Return self: plain numbers are on no device."""
        return self

    def row(self) -> dict[str, float | None]:
        """Return the columns tokens, and load: tokens over the mean of all experts."""
        mean = self.total / self.experts
        return {"tokens": float(self.own), "load": self.own / mean if mean else None}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The data of one row."""

    sums: Sums | OutputSums | Tokens
    format: str | None = None
    cut: int | None = None
    """The axis along which ranks share the matrix; None: every rank has seen the whole."""

    def joined(self, other: "Sample", direction: str, axis: int = 0) -> "Sample":
        """Return this sample joined with another of the same row, which follows it along an axis of the matrix."""
        return replace(self, sums=self.sums.joined(other.sums, below=is_below(axis, direction)))

    def to(self, device: torch.device | str) -> "Sample":
        """Return the sample on another device."""
        return replace(self, sums=self.sums.to(device))


class Captured(NamedTuple):
    """An operand of a linear, on the CPU."""

    matrix: Tensor
    part: tuple[int, int] | None
    """(axis, pieces) of a rank's part of the operand; None: the whole."""


class Probe:
    """Collects the rows of one sampled step. `gemms` also compares each product with the product of unquantized FP32
    tensors.

    A repeated report of a microbatch under one name is skipped: it is a recomputation in backward, so rows equal those
    without recomputation.
    originals: layer name -> the high-precision source of a quantized weight, such as its FP32 master.
    what_if: formats whose errors on the same tensors are measured beside, in rows of their own.
    capture: also keep the operands [rows, cols] of linears in microbatch 0 in CPU memory, as "LAYER.input",
    "LAYER.weight" and "LAYER.grad_output" in `captured`.
    """

    def __init__(
        self,
        step: int,
        *,
        gemms: bool = True,
        originals: Mapping[str, Tensor] | None = None,
        capture: bool = False,
        what_if: Sequence[str] = (),
    ) -> None:
        self.step = step
        self.originals = originals or {}
        self.gemms = gemms
        self.capture = capture
        self.what_if = {text: HybridQuantizer(parse(text), parse(text)) for text in what_if}
        self.operands: dict[str, Captured] = {}
        self.samples: dict[Key, Sample] = {}
        self._reported: set[tuple[str, str, int]] = set()

    @property
    def rows(self) -> list[dict[str, object]]:
        """The rows of all reports; waits for the device."""
        return rows_of(self.step, self.samples)

    @property
    def captured(self) -> dict[str, Tensor]:
        """The kept operands, or this rank's parts of them."""
        return {name: operand.matrix for name, operand in self.operands.items()}

    def tensor(self, site: Site, x: Tensor, quantizer: HybridQuantizer, key: RngKey, states: SlotStates | None) -> None:
        """Report x [rows, cols] in both directions, quantized again as the module quantizes it.

        Errors are relative to the original values, also with columnwise_source rowwise_dequantized.
        """
        if self._is_first(site):
            x = x.detach()
            for what_if, other in {None: quantizer, **self.what_if}.items():
                own = states if what_if is None else None
                both = other.sums(x, key, own) if site.part is None else site.part.sums(other, x, key, own)
                for direction, sums in both.items():
                    self._add(site, direction, sums, str(getattr(other, direction)), what_if)
            if self.capture and site.name in SLOTS and site.microbatch == 0:
                part = site.part and (site.part.axis, site.part.runs)
                self.operands[f"{site.layer}.{site.name}"] = Captured(x.to("cpu", copy=True).contiguous(), part)

    def gemm(
        self, site: Site, a: Tensor, b: Tensor, actual: Tensor, summed: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        """Report how actual [m, n] differs from summed(a [m, k] @ b [n, k].T) of the unquantized tensors in FP32.

        summed: what happened to `actual` after the product, if ranks have parts of k.
        """
        if self.gemms and self._is_first(site):
            expected = summed(a.detach().float() @ b.detach().float().t())
            self._add(site, "output", output_sums(expected, actual.detach()))

    def experts(self, layer: str, tokens: Sequence[int], microbatch: int = 0) -> None:
        """Report the token count of each expert of a mixture: one row each, named "LAYER.0" and so on."""
        if self._is_first(Site(layer=layer, name=ROUTED, microbatch=microbatch)):
            for expert, own in enumerate(tokens):
                counts = Tokens(own, sum(tokens), len(tokens))
                self._add(Site(layer=f"{layer}.{expert}", name=ROUTED), "output", counts)

    def _is_first(self, site: Site) -> bool:
        report = site.layer, site.name, 0 if is_of_step(site.name) else site.microbatch
        known = report in self._reported
        self._reported.add(report)
        return not known

    def _add(
        self,
        site: Site,
        direction: str,
        sums: Sums | OutputSums | Tokens,
        format: str | None = None,
        what_if: str | None = None,
    ) -> None:
        key = Key(site.layer, site.name, direction, what_if)
        sample = Sample(sums=sums, format=format, cut=None if site.part is None else site.part.axis)
        before = self.samples.get(key)
        self.samples[key] = sample if before is None else before.joined(sample, direction)


def is_of_step(name: str) -> bool:
    """Return whether a tensor is the same in all microbatches of a step."""
    return name == "weight"


def rows_of(step: int, samples: Mapping[Key, Sample]) -> list[dict[str, object]]:
    """Return one row per sample, with the columns of the table "stats"."""
    own = ((key, sample) for key, sample in samples.items() if key.what_if is None)
    return [_row(step, *each, (*ERRORS, *LOADS, *PROJECTED)) for each in own]


def what_if_rows_of(step: int, samples: Mapping[Key, Sample]) -> list[dict[str, object]]:
    """Return one row per sample of another format, with the columns of the table "what_if"."""
    return [_row(step, key, sample, ERRORS) for key, sample in samples.items() if key.what_if is not None]


def _row(step: int, key: Key, sample: Sample, columns: Sequence[str]) -> dict[str, object]:
    named = {"step": step, "layer": key.layer, "tensor": key.name, "direction": key.direction, "format": sample.format}
    return named | dict.fromkeys(columns) | finite_or_none(sample.sums.row())
