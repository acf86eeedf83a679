"""Recipes under a budget of bits by the sensitivity of the loss, beside random ones of the same budget.

For an error e of a tensor with gradient g the expected rise of the loss is half the curvature times e^2. The curvature
is Fisher's, from squared gradients of single sequences:

    damage = T / 2 * sum over elements of mean over sequences (g^2) * e^2

for a loss that is a mean over T tokens. Only the forward is known, so columnwise operands count by the same weights. An
allocation is judged by its loss against random ones of the same bits, on other tokens than its gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.formats import Format, RngKey
from hqsweep.jobs.probe.suggest import Pairs, recipe_of, suggest
from hqsweep.jobs.probe.treatments import Treatment, converted_shapes
from hqsweep.models.head_loss import model_loss
from hqsweep.ops.quantize.dequantize import dequantize
from hqsweep.ops.quantize.quantize import encode
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.recipe.roles import clean_name

RANDOM = 3
"""The number of random allocations."""
Row = dict[str, Any]
Progress = Callable[[str, int, int], None]


class _Sums:
    """Sums of one tensor over sequences: e^2 and g^2 e^2 for each quantizer and direction, and x^2."""

    def __init__(self, quantizers: Mapping[str, HybridQuantizer]) -> None:
        self.quantizers = quantizers
        self.damage = dict.fromkeys(((text, d) for text in quantizers for d in DIRECTIONS), 0.0)
        self.error, self.square, self.shape = dict(self.damage), 0.0, (0, 0)
        self.faults: dict[str, str] = {}

    def add(self, x: Tensor, squared_gradient: Tensor, *, key: str) -> None:
        """Add a matrix [rows, cols] and the squares of its gradient."""
        self.square += x.float().square().sum().item()
        self.shape = (self.shape[0] + x.shape[0], x.shape[1])
        for text, quantizer in self.quantizers.items():
            try:
                errors = {d: _error(x, getattr(quantizer, d), d, key) for d in DIRECTIONS}
            except UserError as fault:
                self.faults[text] = str(fault)
                continue
            for direction, error in errors.items():
                self.error[text, direction] += error.square().sum().item()
                self.damage[text, direction] += (error.square() * squared_gradient).sum().item()

    def rows(self, tensor: str, scale: float) -> list[Row]:
        """The rows of suggest(). scale: of the damage."""
        return [
            {
                "tensor": tensor, "shape": list(self.shape), "quantizer": text, "direction": direction,
                "bits": getattr(quantizer, direction).bits_per_element(*_turned(self.shape, direction)),
                "rel_l2": None if text in self.faults else (self.error[text, direction] / (self.square or 1.0)) ** 0.5,
                "damage": None if text in self.faults else scale * self.damage[text, direction],
                "note": self.faults.get(text), "amax": None,
            }
            for text, quantizer in self.quantizers.items()
            for direction in DIRECTIONS
        ]  # fmt: skip


def _turned(shape: tuple[int, int], direction: str) -> tuple[int, int]:
    return shape if direction == "rowwise" else shape[::-1]


def _error(x: Tensor, format: Format, direction: str, key: str) -> Tensor:
    """float32 [rows, cols]: values minus quantized values of a matrix, in one direction."""
    matrix = (x if direction == "rowwise" else x.t()).contiguous()
    format.check_shape(*matrix.shape)
    stream = RngKey(seed=0, slot=f"{key}/{direction}", step=0) if format.stochastic else None
    values = dequantize(encode(matrix, format, key=stream), format, tuple(matrix.shape))
    error = matrix.float() - values
    return error if direction == "rowwise" else error.t()


def sensitive_rows(
    model: nn.Module, tokens: Tensor, quantizers: Mapping[str, HybridQuantizer], *, progress: Progress | None = None
) -> list[Row]:
    """Two rows for each linear's input and weight and each quantizer: rel_l2, damage in nats, shape and bits.

    model: plain, on its device; it is as before afterwards, without gradients. tokens: int64 [B, T + 1]; each sequence
    has a backward of its own, in bf16 autocast.
    """
    linears = {clean_name(name): module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linears = {name: linears[name] for name in converted_shapes(model) if name in linears}
    if not linears:
        raise UserError("--bits: the model has no nn.Linear that a recipe takes, so there is nothing to choose")
    inputs = {name: _Sums(quantizers) for name in linears}
    squares = {name: torch.zeros_like(module.weight, dtype=torch.float32) for name, module in linears.items()}
    progress = progress or (lambda what, done, of: None)
    training = model.training
    model.eval()
    try:
        for index, sequence in enumerate(tokens):
            for name, x, gradient in _backward(model, linears, sequence[None]):
                inputs[name].add(x, gradient.square(), key=f"{name}/{index}")
            for name, module in linears.items():
                if module.weight.grad is not None:
                    squares[name] += module.weight.grad.float().square() / len(tokens)
            model.zero_grad(set_to_none=True)
            progress("sensitivity", index + 1, len(tokens))
    finally:
        model.train(training)
        model.zero_grad(set_to_none=True)
    rows: list[Row] = []
    for name, module in linears.items():
        weight = _Sums(quantizers)
        weight.add(module.weight.detach().bfloat16(), squares[name], key=name)
        half = 0.5 * (tokens.shape[1] - 1)
        rows += weight.rows(f"{name}.weight", half) + inputs[name].rows(f"{name}.input", half / len(tokens))
    return rows


def _backward(model: nn.Module, linears: Mapping[str, nn.Linear], sequence: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """(linear, its input bfloat16 [T, K], the loss's gradient of it through this linear) for each linear."""
    kept: dict[nn.Module, Tensor] = {}
    found: list[tuple[str, Tensor, Tensor]] = []
    names = {module: name for name, module in linears.items()}

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        kept[module] = args[0].detach().flatten(0, -2).bfloat16()

    def look(module: nn.Linear, _: Any, output_gradients: tuple[Tensor, ...]) -> None:
        dy = output_gradients[0].flatten(0, -2).float()
        found.append((names[module], kept.pop(module), dy @ module.weight.detach().float()))

    hooks = [module.register_forward_pre_hook(keep) for module in names]
    hooks += [module.register_full_backward_hook(look) for module in names]
    device = next(model.parameters()).device
    try:
        with torch.autocast(device.type, torch.bfloat16):
            ids = sequence.to(device)
            loss = model_loss(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())[0]
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def allocations(rows: Sequence[Row], bits: float, pairs: Pairs = "strict") -> list[Treatment]:
    """The arms of a budget: by damage, by the error alone, and RANDOM random ones with the same choices and bits."""
    plain = [{**row, "damage": None} for row in rows]
    name = f"bits{bits:g}"
    found = [(name, suggest(rows, bits, pairs), "by the sensitivity of the loss")]
    found.append((f"{name}_unweighted", suggest(plain, bits, pairs), "by the error alone"))
    for seed in range(RANDOM):
        found.append((f"{name}_random{seed}", suggest(rows, bits, pairs, seed=seed), "random"))
    arms = []
    for arm, suggestion, why in found:
        recipe = recipe_of(suggestion, arm)
        linear = recipe["linear"]
        linear = dict.fromkeys(("input", "weight", "grad_output"), linear) if isinstance(linear, str) else linear
        overrides = {"recipe": "bf16"} | {f"recipe.linear.{slot}": text for slot, text in linear.items()}
        overrides["recipe.overrides"] = recipe["overrides"]
        said = f"{suggestion.bits:.2f} bits an element, {why}"
        if arm == name:
            said += f", predicted rise {suggestion.damage:.4f} nats"
        arms.append(Treatment(name=arm, overrides=overrides, why=said))
    return arms


def judged(arms: Sequence[Treatment], losses: Mapping[str, float], reference: float) -> str:
    """A sentence: the loss of the allocation by sensitivity, against the others. arms: of allocations()."""
    own, unweighted, *others = (losses[arm.name] - reference for arm in arms)
    beaten = sum(own < other for other in others)
    verdict = "so the choice is worth something" if beaten == len(others) else "so it is no better than chance here"
    return (
        f"{arms[0].name} raises the loss by {own:.4f} nats at once, by the error alone {unweighted:.4f}, random"
        f" allocations of the same bits {min(others):.4f} to {max(others):.4f}; it is below {beaten} of {len(others)},"
        f" {verdict}"
    )
