"""UserAdapter: a user's own model, from Hugging Face or a function, as the training loop's model.

Its parameters keep their own dtypes (float32 from Hugging Face). Under train.dtype=bf16 it runs in torch.autocast, and
linears that compute by the recipe take bf16, like the GPT's linears.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.checkpoints.user_model import check_same, weights_of
from hqsweep.checkpoints.weights import load_checkpoint
from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.model import FactoryModelConfig, HFModelConfig, UserModel
from hqsweep.config.train import FactoryDataConfig
from hqsweep.errors import UserError
from hqsweep.models.attention import take_fast_kernels
from hqsweep.models.batches import ATTRIBUTE, BatchLoss
from hqsweep.models.build import (
    CompiledBlocks,
    build,
    check_code,
    check_ranks,
    check_recompute,
    code_of,
    code_of_modules,
    vocab_fault,
)
from hqsweep.models.conversion import Conversion
from hqsweep.models.convert import convert
from hqsweep.models.head_loss import HeadLoss, check_causal, is_hugging_face, model_loss, why_whole
from hqsweep.models.held import held_parts, is_quantized
from hqsweep.models.hf import load_model
from hqsweep.models.hf_folder import HFConfig, read_hf_config
from hqsweep.nn.core.context import quantization
from hqsweep.nn.core.options import quantized_model_init
from hqsweep.nn.linears import LinearBase
from hqsweep.nn.saved_memory import input_bytes
from hqsweep.parallel.wire.collectives import rank_in
from hqsweep.parallel.wire.local import whole_tensor
from hqsweep.recipe.base import AnyRecipe
from hqsweep.torch_private import DropoutNd
from hqsweep.train.adapter import Balance, Losses, Saving, by_decay, keyed_seed
from hqsweep.train.data import loaded
from hqsweep.train.step import NotCapturable

CODE = "model_code"
"""The key of Origin.code in a checkpoint and in the manifest."""
CONVERSION = "conversion"
"""The key, in a checkpoint, of states of delayed scaling, which the model's state_dict does not have."""
NUMBERS = "parameter_numbers"
"""The key, in a checkpoint, of the mapping from a parameter's name to its number in the optimizer."""

EVALUATION = 2**32
"""The key of the random numbers of evaluations. No (seed, step, microbatch) equals it."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The function that built a model, and its code (models.build.code_of)."""

    target: str
    code: str


class UserAdapter:
    """The ModelAdapter of a model that convert() has converted. dtype: the dtype of products by the recipe."""

    def __init__(
        self,
        model: nn.Module,
        conversion: Conversion,
        dtype: torch.dtype,
        head_loss: HeadLoss | None = None,
        origin: Origin | None = None,
        compiled: CompiledBlocks | None = None,
    ) -> None:
        self.model, self.conversion, self.origin = model, conversion, origin
        self.compiled = compiled
        self.autocast = None if dtype is torch.float32 else dtype
        self.around = head_loss or nullcontext
        own_loss = not is_hugging_face(model) and callable(getattr(model, "loss", None))
        self.methods = ("loss",) if own_loss else ()
        self.device = next(model.parameters()).device
        config = getattr(model, "config", None)
        self.has_aux = bool(getattr(config, "output_router_logits", False))
        self.draws: bool | None = draws_numbers(model) or None  # None: the first forward in training tells
        self.why_eager = "the model has dropout" if self.draws else None
        conversion.reset()

    def losses(self, inputs: Tensor, targets: Tensor, saving: Saving = nullcontext) -> Losses:
        """The losses of models.head_loss.model_loss. `saving` surrounds the whole model, its loss included."""
        self._compile(inputs, targets)
        before = generator_state(self.device) if self.draws is None and torch.is_grad_enabled() else None
        on_host = torch.get_rng_state() if is_captured(self.device) else None
        with saving(), self._autocast():
            cross_entropy, aux = model_loss(self.model, inputs, targets, self.around)
        if before is not None:
            self.draws = not torch.equal(before, generator_state(self.device))
        if on_host is not None and not torch.equal(on_host, torch.get_rng_state()):  # it did not draw in the first step
            raise NotCapturable("the model draws random numbers")
        minimized = cross_entropy if aux is None else cross_entropy + aux
        self.has_aux = self.has_aux or aux is not None
        balance = Balance(loss=cross_entropy.new_zeros(()) if aux is None else aux, tokens=[])
        return Losses(cross_entropy=cross_entropy, minimized=minimized, balance=balance)

    def _compile(self, inputs: Tensor, targets: Tensor) -> None:
        """Compile the blocks before the first forward in training, on its batch."""
        if self.compiled is None or not torch.is_grad_enabled() or is_captured(self.device):
            return

        def minimized() -> Tensor:
            with self._autocast():
                cross_entropy, aux = model_loss(self.model, inputs, targets, self.around)
            return cross_entropy if aux is None else cross_entropy + aux

        self.compiled.try_once(minimized, partial(print, flush=True))

    def begin(self, key: tuple[int, int, int]) -> None:
        """Seed torch's generators by the key, for models that draw from them.

        So a resumed run, and every arm, drops the same elements. Raises NotCapturable in a CUDA graph for a model that
        draws.
        """
        if not is_captured(self.device):
            torch.manual_seed(keyed_seed(*key))
        elif self.draws:
            raise NotCapturable("the model draws random numbers")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The context of evaluations, without dropout. Other random numbers are the same in every evaluation."""
        self.model.eval()
        if not is_captured(self.device):
            torch.manual_seed(keyed_seed(EVALUATION))
        try:
            yield
        finally:
            self.model.train()

    def decayed(self) -> list[Tensor]:
        """The matrices, also stacked ones. Embeddings, gains and biases do not decay."""
        tables = {id(module.weight) for module in self.model.modules() if isinstance(module, nn.Embedding)}
        stacked = {id(p) for p in self.model.parameters() if p.dim() > 1}
        biases = {id(p) for name, p in self.model.named_parameters() if name.endswith("bias")}
        return [p for p in self.model.parameters() if id(p) in stacked - tables - biases]

    def saved_inputs(self, tokens: int) -> Iterator[tuple[str, float]]:
        """The saved inputs of linears. Experts are left out, because their numbers of tokens are not known here."""
        parts = (part for part in self.conversion.parts if part.module.module_type == "linear")
        return ((p.module.name, input_bytes(p.module, p.shape[-1], tokens)) for p in parts)

    def originals(self, master: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        masters: dict[str, Tensor] = {}
        for _, part, weight in held_parts(self.model):
            if part.module_type == "linear":
                masters[part.name] = master(weight)
            else:
                masters |= {f"{part.name}.{e}": w for e, w in enumerate(whole_tensor(master(weight)))}
        return masters

    def state(self) -> dict[str, Any]:
        """The states of delayed scaling and the code of the model. Where weights are held quantized, also the number of
        each parameter in the optimizer, by which its master is found without the model."""
        states = {CONVERSION: states} if (states := self.conversion.state_dict()) else {}
        if any(True for _ in held_parts(self.model)):
            numbers = {p: i for i, p in enumerate(chain(*by_decay(self.model, self.decayed())))}
            named = self.model.named_parameters(remove_duplicate=False)
            states[NUMBERS] = {name: numbers[p] for name, p in named}
        return states | self.facts

    def check(self, state: Mapping[str, Any]) -> None:
        if self.origin is not None:
            check_code(self.origin.target, state.get(CODE), self.origin.code)

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.check(state)
        self.conversion.load_state_dict(state.get(CONVERSION, {}))

    @property
    def facts(self) -> dict[str, str]:
        return {} if self.origin is None else {CODE: self.origin.code}

    @property
    def taken(self) -> dict[str, Any]:
        own = self.conversion
        return {"converted": {"text": str(own), "share": own.share, "quantized_share": own.quantized_share}}

    def unused(self) -> list[str]:
        return self.conversion.unused()

    def _autocast(self) -> AbstractContextManager:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which no generator can be seeded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def generator_state(device: torch.device) -> Tensor:
    """The states of torch's generators of the CPU and of the device."""
    return torch.cat([torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])])


def draws_numbers(model: nn.Module) -> bool:
    """Return whether a forward in training draws from torch's generator, as far as modules and config show."""
    if any(isinstance(module, DropoutNd) and module.p > 0 for module in model.modules()):
        return True
    config = getattr(model, "config", None)
    keys = config.to_dict() if hasattr(config, "to_dict") else {}
    return HFConfig(path=Path(), keys=keys).dropout


def user_adapter(
    config: ConvergenceConfig, vocab_size: int, recipe: AnyRecipe, device: torch.device, dtype: torch.dtype
) -> UserAdapter:
    """The user's model of a config on the device, in a recipe.

    UserError where the model is missing, differs from the plan, does not fit the data, or has no module that the recipe
    can take.
    """
    section, train = config.model, config.train
    if isinstance(section, HFModelConfig):
        check_same(section)
    model = trained_weights(section, config.seed) if isinstance(section, HFModelConfig) else build(section, config.seed)
    origin = None
    if isinstance(section, FactoryModelConfig):
        functions = [section.factory, *([section.loss_function] if section.loss else [])]
        origin = Origin(target=section.target, code=code_of(model, *functions))
    elif section.loss:
        origin = Origin(target=section.loss, code=code_of_modules({section.loss_function.__module__}))
    if section.init_noise:
        perturb_weights(model, section.init_noise, config.seed)
    if fault := vocab_fault(model, vocab_size):
        raise UserError(f"model: the data has {vocab_size} tokens, but {fault}; give another model, or other data")
    if isinstance(config.data, FactoryDataConfig) or section.loss:
        packing = getattr(loaded(config.data), "packing", None)
        BatchLoss(packing=packing, function=section.loss_function).attach(model)
    else:
        check_causal(model, vocab_size)
    if train.recompute != "none":
        check_recompute(model, train.recompute)
        compute_again(model)
    if train.parallel.world > 1:
        check_ranks(model)
    fast = device.type == "cuda" and train.compile != "off" and train.parallel.world == 1
    by_chunks = fast and dtype is torch.bfloat16 and loss_by_chunks(model)
    conversion = convert_for_training(model, recipe, section, config.seed, dtype)
    compiled = None
    if fast:
        take_fast_kernels(model)
        compiled = CompiledBlocks(model, conversion)
    return UserAdapter(model.to(device), conversion, dtype, HeadLoss(model) if by_chunks else None, origin, compiled)


def convert_for_training(
    model: nn.Module, recipe: AnyRecipe, section: UserModel, seed: int, dtype: torch.dtype
) -> Conversion:
    """Run convert() for products in the dtype of a run. Print a line on the result. With quantized_weights, weights are
    held.

    UserError where no weight that the recipe quantizes can be held.
    """
    options: dict[str, Any] = {"head": section.head, "attention": section.attention}
    if not section.quantized_weights:
        return _said(convert(model, recipe, **options))
    options["dtype"] = torch.bfloat16 if dtype is torch.bfloat16 else None  # the dtype of torch.autocast in training
    with quantized_model_init(preserve_high_precision_init_val=True), quantization(seed=seed):
        conversion = convert(model, recipe, **options)
    parts = [part.module for part in conversion.parts if isinstance(part.module, LinearBase)]
    quantized = {part.name for part in parts if is_quantized(part.quantizers.weight)}
    if quantized and not any(True for _ in held_parts(model)):
        first = next(weight for weight in conversion.plain if weight.name in quantized)
        raise UserError(
            f"model.quantized_weights: no weight of {type(model).__name__} can be held quantized ({first.name}:"
            f" {first.why}); give false"
        )
    return _said(conversion)


def _said(conversion: Conversion) -> Conversion:
    """The conversion, after the first rank has logged it in words."""
    if rank_in() == 0:
        print(f"model: {conversion}", flush=True)
    return conversion


def loss_by_chunks(model: nn.Module) -> bool:
    """Whether HeadLoss computes the loss of a model. Prints that it does, or why not."""
    if not is_hugging_face(model) or ATTRIBUTE in model.__dict__:
        return False
    why = why_whole(model)
    print("loss: by chunks of tokens" if why is None else f"loss: of whole logits, for {why}", flush=True)
    return why is None


def trained_weights(section: HFModelConfig, seed: int) -> nn.Module:
    """A Hugging Face model with weights. They may lie in another kind of checkpoint beside the config."""
    if not section.pretrained or weights_of(section).kind == "safetensors":
        return build(section, seed)
    config = read_hf_config(section.path)
    model = load_model(config.path, pretrained=False, seed=seed, architecture=section.architecture)
    load_checkpoint(Path(section.path), model)
    return model


def compute_again(model: nn.Module) -> None:
    """Have a Hugging Face model compute its layers again in backward. Versions differ in the method's name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@torch.no_grad()
def perturb_weights(model: nn.Module, noise: float, seed: int) -> None:
    """Multiply every parameter by 1 + noise * eps, eps ~ N(0, 1) keyed by the seed, for a null arm."""
    drawn = torch.Generator().manual_seed(keyed_seed(seed))
    for parameter in model.parameters():
        parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=drawn))
