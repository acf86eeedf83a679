"""UserAdapter: a model of a user's own, of Hugging Face or from a function, as the training loop's model.

Its parameters are as they are (float32 of Hugging Face); under train.dtype=bf16 it runs in torch.autocast, in which the
linears that compute by the recipe take bf16 as those of the GPT do.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hqsweep.checkpoints.load import load_checkpoint
from hqsweep.checkpoints.user_model import check_same, weights_of
from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.user_model import HFModelConfig
from hqsweep.errors import UserError
from hqsweep.models.build import build, check_recompute, vocab_fault
from hqsweep.models.conversion import Conversion
from hqsweep.models.convert import convert
from hqsweep.models.hf import load_model
from hqsweep.models.hf_config import HFConfig, read_hf_config
from hqsweep.models.losses import model_loss
from hqsweep.nn.saved import input_bytes
from hqsweep.recipe.base import AnyRecipe
from hqsweep.train.adapter import Balance, Losses, Saving
from hqsweep.train.keyed import keyed_seed

CONVERSION = "conversion"
"""Key of a checkpoint: the states of delayed scaling, which are not in the model's state_dict."""


class UserAdapter:
    """adapter.ModelAdapter of a model that convert() has converted. dtype: of products by the recipe."""

    def __init__(self, model: nn.Module, conversion: Conversion, dtype: torch.dtype) -> None:
        self.model, self.conversion, self.dtype = model, conversion, dtype
        self.device = next(model.parameters()).device
        config = getattr(model, "config", None)
        self.has_aux = bool(getattr(config, "output_router_logits", False))
        self.draws = draws_numbers(model)
        self.why_eager = "the model has dropout" if self.draws else None
        conversion.reset()

    def losses(self, inputs: Tensor, targets: Tensor, saving: Saving = nullcontext) -> Losses:
        """As models.losses.model_loss has them; `saving` is around the whole model, its loss included."""
        with saving(), self._autocast():
            cross_entropy, aux = model_loss(self.model, inputs, targets)
        minimized = cross_entropy if aux is None else cross_entropy + aux
        self.has_aux = self.has_aux or aux is not None
        balance = Balance(loss=cross_entropy.new_zeros(()) if aux is None else aux, tokens=[])
        return Losses(cross_entropy=cross_entropy, minimized=minimized, balance=balance)

    def begin(self, key: tuple[int, int, int]) -> None:
        """Dropout is a function of the key: a resumed run drops what an uninterrupted one does, and so do all arms."""
        if self.draws:
            torch.manual_seed(keyed_seed(*key))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without dropout."""
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def decayed(self) -> list[Tensor]:
        """Matrices, also stacked ones; embeddings, gains and biases do not decay."""
        tables = {id(module.weight) for module in self.model.modules() if isinstance(module, nn.Embedding)}
        stacked = {id(p) for p in self.model.parameters() if p.dim() > 1}
        biases = {id(p) for name, p in self.model.named_parameters() if name.endswith("bias")}
        return [p for p in self.model.parameters() if id(p) in stacked - tables - biases]

    def saved_inputs(self, tokens: int) -> Iterator[tuple[str, float]]:
        """Of linears; how many tokens experts get is not known here."""
        parts = (part for part in self.conversion.parts if part.module.module_type == "linear")
        return ((p.module.name, input_bytes(p.module, p.shape[-1], tokens)) for p in parts)

    def originals(self, master: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """None are needed: no weight is held quantized."""
        return {}

    def state(self) -> dict[str, Any]:
        """The states of delayed scaling."""
        states = self.conversion.state_dict()
        return {CONVERSION: states} if states else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.conversion.load_state_dict(state.get(CONVERSION, {}))

    def unused(self) -> list[str]:
        return self.conversion.unused()

    def _autocast(self) -> AbstractContextManager:
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def draws_numbers(model: nn.Module) -> bool:
    """Whether a forward in training draws from torch's generator, as far as its modules and its config tell."""
    if any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules()):
        return True
    config = getattr(model, "config", None)
    keys = config.to_dict() if hasattr(config, "to_dict") else {}
    return HFConfig(path=Path(), keys=keys).dropout


def user_adapter(
    config: ConvergenceConfig, vocab_size: int, recipe: AnyRecipe, device: torch.device, dtype: torch.dtype
) -> UserAdapter:
    """The user's model of a config on the device, in a recipe. UserError where it is not there, is another than was
    planned, does not fit the data, or is nothing that the recipe can take."""
    section, train = config.model, config.train
    if isinstance(section, HFModelConfig):
        check_same(section)
    model = trained_weights(section, config.seed) if isinstance(section, HFModelConfig) else build(section, config.seed)
    if section.init_noise:
        perturb_weights(model, section.init_noise, config.seed)
    if fault := vocab_fault(model, vocab_size):
        raise UserError(f"model: the data has {vocab_size} tokens, but {fault}; give another model, or other data")
    if train.recompute != "none":
        check_recompute(model, train.recompute)
        compute_again(model)
    conversion = convert(model, recipe, head=section.head, attention=section.attention)
    return UserAdapter(model.to(device), conversion, dtype)


def trained_weights(section: HFModelConfig, seed: int) -> nn.Module:
    """A Hugging Face model; its weights may lie in another kind of checkpoint beside the config."""
    if not section.pretrained or weights_of(section).kind == "safetensors":
        return build(section, seed)
    config = read_hf_config(section.path)
    model = load_model(config.path, pretrained=False, seed=seed)
    load_checkpoint(Path(section.path), model)
    return model


def compute_again(model: nn.Module) -> None:
    """Have a Hugging Face model compute its layers again in backward; the method has had two names."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@torch.no_grad()
def perturb_weights(model: nn.Module, noise: float, seed: int) -> None:
    """Multiply every parameter by 1 + noise * eps, eps ~ N(0, 1) by the seed, for a null arm."""
    drawn = torch.Generator().manual_seed(keyed_seed(seed))
    for parameter in model.parameters():
        parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=drawn))
