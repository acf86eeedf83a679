"""What a low-precision recipe costs a model at once, and where: the loss of a few tokens, without training.

The forward of a recipe's linears is tried on the whole model, then on one layer at a time, on one kind of linear, and
on one operand. Differences to the loss in high precision name the parts that cause it. The channels of the residual
stream that are much larger than the others are named, and the loss is measured with the largest channels of every
linear's input in high precision. Only forwards count, so the columnwise operands of a recipe have no part here.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.models.convert import convert, revert
from hqsweep.models.head_loss import model_loss
from hqsweep.nn import quantization, set_recipe
from hqsweep.recipe.argument import parse_recipe, recipe_config, recipe_of
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.roles import clean_name
from hqsweep.recipe.sectioned import Recipe

PLAIN = {"input": "bf16", "weight": "bf16", "grad_output": "bf16"}
OUTLIER = 10.0
"""A channel of the residual stream is an outlier if its largest value is this many times the median channel's."""
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
"""A massive activation is at least this large, and this many times the median of its layer (Sun et al. 2024,
arXiv 2402.17762)."""
SHARE = 64
"""One channel in so many of each linear's input is kept in high precision for Causes.without_channels."""
SHOWN = 8
Progress = Callable[[str, int, int], None]
"""Gets what was tried, how many trials are done, and how many there are."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The loss, in nats, with one part of a model in the recipe. share: its increase as a share of the whole one."""

    name: str
    loss: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Channel:
    """A channel of the residual stream. ratio: its largest value in units of the median channel's, in the layer where
    it is most; layers: in how many it is an outlier; massive: its largest value where it is a massive activation."""

    channel: int
    ratio: float
    layer: str
    layers: int
    massive: float | None
    position: int | None


@dataclass(frozen=True, kw_only=True)
class Causes:
    """The causes of a recipe's loss at once, largest first. reference, loss: without and with the recipe, in nats;
    without_channels: with the largest 1 / SHARE of the channels of each linear's input in high precision."""

    recipe: str
    tokens: int
    reference: float
    loss: float
    without_channels: float
    layers: tuple[Part, ...]
    kinds: tuple[Part, ...]
    slots: tuple[Part, ...]
    channels: tuple[Channel, ...]

    @property
    def increase(self) -> float:
        """The increase of the loss in nats."""
        return self.loss - self.reference

    @property
    def channel_share(self) -> float:
        """The share of the increase that the largest channels carry."""
        return (self.loss - self.without_channels) / self.increase if self.increase else 0.0

    def document(self) -> dict[str, Any]:
        """JSON values of all fields."""
        return asdict(self) | {"increase": self.increase, "channel_share": self.channel_share}


def probe_loss(
    model: nn.Module,
    tokens: Tensor,
    recipe: str | Mapping[str, Any] = "nvfp4",
    *,
    progress: Progress | None = None,
) -> Causes:
    """What makes the loss of a causal language model larger in a recipe, on tokens int64 [B, T + 1].

    model: plain, on its device; it is as before afterwards. Its linears but the output projection take the recipe, in
    bf16 autocast. recipe: as convert() takes it, without a schedule or a Python factory.

    Raises:
        UserError: the recipe quantizes no linear, or the model has none.
    """
    found = recipe_of(recipe)
    if not isinstance(found, Recipe):
        raise UserError("probe: a Python factory gives this recipe's quantizers; give a recipe of sections")
    name = recipe if isinstance(recipe, str) else str(recipe.get("name", "recipe"))
    trial = _Trial(model, tokens, recipe_config(found)["linear"], progress or (lambda what, done, of: None))
    with trial.converted():
        return trial.causes(name)


def losses_at_once(
    model: nn.Module, tokens: Tensor, recipes: Mapping[str, Mapping[str, Any]], *, progress: Progress | None = None
) -> dict[str, float]:
    """Name -> the loss in nats of a plain model in each recipe config, as probe_loss() measures it."""
    trial = _Trial(model, tokens, {"input": "nvfp4", "weight": "nvfp4"}, progress or (lambda what, done, of: None))
    losses = {}
    with trial.converted():
        for done, (name, recipe) in enumerate(recipes.items(), 1):
            losses[name] = trial.measured(parse_recipe(recipe))
            trial.progress(name, done, len(recipes))
    return losses


class _Trial:
    """Forwards of one model on the same tokens, in recipes that differ by module."""

    def __init__(self, model: nn.Module, tokens: Tensor, linear: Mapping[str, str], progress: Progress) -> None:
        self.model, self.progress, self.done = model, progress, 0
        self.tokens = tokens.to(next(model.parameters()).device)
        self.low = {slot: f"{linear[slot].partition('|')[0].partition('@')[0]}|bf16" for slot in ("input", "weight")}
        self.low = {slot: re.sub(r"\+(rht|sr|nosign)", "", text) for slot, text in self.low.items()} | {
            "grad_output": "bf16"
        }
        if all(text.startswith("bf16") for text in self.low.values()):
            raise UserError("probe: the recipe quantizes no operand of a forward; give one such as nvfp4")

    @contextmanager
    def converted(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        conversion = convert(self.model, self._recipe(PLAIN))
        self.names = [module.name for module in conversion.modules if module.kind == "linear"]
        try:
            if not self.names:
                raise UserError("probe: the model has no linear that the recipe takes")
            yield
        finally:
            revert(self.model)
            self.model.train(training)

    def causes(self, name: str) -> Causes:
        layers, kinds = _groups(self.names, _layer), _groups(self.names, _kind)
        self.total = len(layers) + len(kinds) + 5
        seen = _Seen(self.model, [self._module(each) for each in self.names], list(layers))
        with seen.watching():
            reference = self._loss("high precision", PLAIN)
        loss = self._loss(name, self.low)
        with seen.exact_channels():
            without = self._loss("largest channels in high precision", self.low)

        def part(label: str, modules: Sequence[str], linear: Mapping[str, str]) -> Part:
            others = [] if len(modules) == len(self.names) else modules
            value = self._loss(label, linear if not others else PLAIN, others, linear)
            return Part(name=label, loss=value, share=(value - reference) / (loss - reference or 1.0))

        slots = [part(slot, self.names, {**PLAIN, slot: self.low[slot]}) for slot in ("input", "weight")]
        found = [[part(label, modules, self.low) for label, modules in group.items()] for group in (layers, kinds)]
        ranked = [tuple(sorted(parts, key=lambda each: -each.loss)) for parts in (*found, slots)]
        return Causes(
            recipe=name, tokens=self.tokens[:, 1:].numel(), reference=reference, loss=loss, without_channels=without,
            layers=ranked[0], kinds=ranked[1], slots=ranked[2], channels=seen.channels(),
        )  # fmt: skip

    def _module(self, name: str) -> nn.Module:
        return next(module for full, module in self.model.named_modules() if clean_name(full) == name)

    def _loss(
        self, what: str, linear: Mapping[str, str], modules: Sequence[str] = (), other: Mapping[str, str] | None = None
    ) -> float:
        """The mean cross entropy in nats, with `linear` everywhere, but `other` in these modules."""
        loss = self.measured(self._recipe(linear, modules, other))
        self.done += 1
        self.progress(what, self.done, self.total)
        return loss

    @torch.no_grad()
    def measured(self, recipe: AnyRecipe) -> float:
        """The mean cross entropy in nats in a recipe."""
        set_recipe(self.model, recipe)
        device = self.tokens.device.type
        with quantization(seed=0, step=1), torch.autocast(device, torch.bfloat16):
            return model_loss(self.model, self.tokens[:, :-1].contiguous(), self.tokens[:, 1:].contiguous())[0].item()

    def _recipe(
        self, linear: Mapping[str, str], modules: Sequence[str] = (), other: Mapping[str, str] | None = None
    ) -> AnyRecipe:
        overrides = [{"name": re.sub(r"([\[\]*?])", r"[\1]", name), "linear": dict(other)} for name in modules]
        return parse_recipe({"name": "probe", "linear": dict(linear), "overrides": overrides})


class _Seen:
    """What the reference's forward shows: the residual stream before each layer, and the inputs of linears."""

    def __init__(self, model: nn.Module, linears: Sequence[nn.Module], layers: Sequence[str]) -> None:
        self.linears = linears
        named = {clean_name(name): module for name, module in model.named_modules()}
        self.blocks = {layer: named[layer] for layer in layers if layer in named}
        self.largest: dict[nn.Module, Tensor] = {}
        self.stream: dict[str, tuple[Tensor, Tensor, float]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The context of the forward that is looked at."""
        hooks = [module.register_forward_pre_hook(self._input) for module in self.linears]
        for layer, block in self.blocks.items():
            hooks.append(block.register_forward_pre_hook(lambda module, x, layer=layer: self._residual(layer, x)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _input(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.largest[module] = inputs[0].detach().float().abs().flatten(0, -2).amax(0)

    def _residual(self, layer: str, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].dim() == 3:
            x = inputs[0].detach().float().abs()
            largest, where = x.amax(0).max(0)
            self.stream[layer] = (largest, where, x.median().item())

    @contextmanager
    def exact_channels(self) -> Iterator[None]:
        """The context in which the largest channels of each linear's input are multiplied in high precision."""
        hooks, kept = [], {}

        def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            channels = places[module]
            kept[module] = inputs[0][..., channels]
            rest = inputs[0].clone()
            rest[..., channels] = 0
            return (rest, *inputs[1:])

        def after(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output + F.linear(kept.pop(module), module.weight[:, places[module]]).to(output.dtype)

        places = {m: x.topk(max(1, len(x) // SHARE)).indices for m, x in self.largest.items() if _is_linear(m, x)}
        for module in places:
            hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def channels(self) -> tuple[Channel, ...]:
        """The outliers of the residual stream, the largest ratio first."""
        found: dict[int, list[Channel]] = {}
        for layer, (largest, where, median) in self.stream.items():
            ratios = largest / largest.median().clamp(min=1e-30)
            for channel in (ratios > OUTLIER).nonzero().flatten().tolist():
                value = largest[channel].item()
                massive = value if value > MASSIVE and value > MASSIVE_RATIO * median else None
                one = Channel(
                    channel=channel, ratio=ratios[channel].item(), layer=layer, layers=1, massive=massive,
                    position=int(where[channel]),
                )  # fmt: skip
                found.setdefault(channel, []).append(one)
        worst = [max(each, key=lambda one: one.ratio) for each in found.values()]
        counted = [Channel(**asdict(one) | {"layers": len(found[one.channel])}) for one in worst]
        return tuple(sorted(counted, key=lambda one: -one.ratio))


def _is_linear(module: nn.Module, channels: Tensor) -> bool:
    """Whether the weight is [out, in], as in nn.Linear, and not [in, out], as in Conv1D."""
    return module.weight.dim() == 2 and isinstance(module, nn.Linear) and module.weight.shape[1] == len(channels)


def _groups(names: Sequence[str], key: Callable[[str], str | None]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        if (label := key(name)) is not None:
            groups.setdefault(label, []).append(name)
    return groups


def _layer(name: str) -> str | None:
    """The layer of a module: its name up to the first number; None outside of layers."""
    match = re.match(r"(.*?\.\d+)(\.|$)", name)
    return match[1] if match else None


def _kind(name: str) -> str:
    """The name of a module with * for its layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
