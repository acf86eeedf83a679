"""Causal language models of Hugging Face: how they are loaded, and their loss. Nothing is downloaded, and no code that
lies beside weights is run. transformers, which takes seconds to import, is imported by these functions alone.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.models.hf_config import HFConfig, read_hf_config
from hqsweep.models.unpacked import unpacked

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(path_or_config: str | Path, *, pretrained: bool = True, dtype: str = "float32", seed: int = 0) -> Any:
    """A causal language model in training mode, on the CPU, its parameters in `dtype`.

    path_or_config: a folder with config.json and safetensors. With pretrained=False it may be a config.json; the seed
    then makes random weights, and the caller's random state is restored.

    Raises:
        UserError: there is no such model, transformers is not installed or does not know it, or the weights are not
            those of the config: some are missing, of other names, or of other shapes.
    """
    if dtype not in DTYPES:
        raise UserError(f"load_model: dtype got {dtype!r}; must be one of {', '.join(DTYPES)}")
    config = read_hf_config(path_or_config)
    auto = _transformers().AutoModelForCausalLM
    if not pretrained:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _explained(config, auto.from_config, hf_config(config), dtype=DTYPES[dtype]).train()
    options = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # which are told of below, with their names
    with quietly():
        model, told = _explained(config, auto.from_pretrained, str(config.folder), dtype=DTYPES[dtype], **options)
    _check_loaded(config, told)
    return model.train()


def meta_model(config: HFConfig) -> Any:
    """The model of a config without memory for its weights."""
    own = hf_config(config)
    with torch.device("meta"):
        return _explained(config, _transformers().AutoModelForCausalLM.from_config, own, dtype=torch.float32)


def one_layer(path: str | Path, most: int) -> Any:
    """The model of a config with one layer and random weights; None where transformers cannot build it, or where it has
    more than `most` parameters. The caller's random state is restored."""
    config, auto = hf_config(read_hf_config(path)), _transformers().AutoModelForCausalLM
    try:
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
        with quietly(), torch.random.fork_rng(devices=[]):
            with torch.device("meta"):
                parameters = sum(p.numel() for p in auto.from_config(config).parameters())
            torch.manual_seed(0)
            return auto.from_config(config, dtype=torch.float32) if parameters <= most else None
    except Exception:  # such as one whose layers have other names
        return None


def hf_config(config: HFConfig) -> Any:
    """transformers' own object of a config. UserError for a type of model that it does not know."""
    auto = _transformers().AutoConfig
    return _explained(config, auto.from_pretrained, str(config.path), local_files_only=True, trust_remote_code=False)


Around = Callable[[], AbstractContextManager]
"""A context that a model's forward runs in."""


def causal_lm_loss(
    model: nn.Module, inputs: Tensor, targets: Tensor, around: Around = nullcontext
) -> tuple[Tensor, Tensor | None]:
    """(cross entropy, auxiliary loss), each [] and in nats, of inputs and targets, int64 [B, T], as the model defines
    them; what it would minimize is their sum. targets[b, t] is the token after inputs[b, t]: nothing is shifted again.
    A row is one sequence (models.unpacked). The auxiliary loss is the term of a mixture that was told to have one
    (output_router_logits); None otherwise. around: the context of the forward, such as head_loss.HeadLoss."""
    targets = targets.contiguous()  # which it takes a view of
    with around(), unpacked():
        out = model(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False)
    aux = getattr(out, "aux_loss", None)
    if aux is None or not isinstance(aux, Tensor) or not aux.is_floating_point():
        return out.loss, None
    weighted = aux.to(out.loss.device) * _aux_weight(model)
    return out.loss - weighted, weighted


def _aux_weight(model: nn.Module) -> float:
    """The factor of the model's auxiliary loss."""
    weight = getattr(model, "router_aux_loss_coef", None)
    config = getattr(model, "config", None)
    return getattr(config, "router_aux_loss_coef", 0.0) if weight is None else weight


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError(
            "model: a Hugging Face model needs the package transformers; pip install 'hqsweep[models]'"
        ) from None
    return transformers


@contextmanager
def quietly() -> Iterator[None]:
    """Within this context transformers shows no bars of progress, and no report of what a UserError tells."""
    logging = _transformers().utils.logging
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def _explained(config: HFConfig, function: Any, *args: Any, **options: Any) -> Any:
    """Call transformers, which may raise anything, and raise that as a UserError of one line, which names the
    config."""
    try:
        return function(*args, **options)
    except UserError:
        raise
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"model.path: '{config.path}' ({config.model_type}): {why}") from None


def _check_loaded(config: HFConfig, told: Any) -> None:
    """UserError unless every weight of the model was read, and every one of the checkpoint was the model's."""
    told = told if isinstance(told, dict) else vars(told)
    words = {
        "missing_keys": "lack",
        "unexpected_keys": "have, and the model has not,",
        "mismatched_keys": "have other shapes of",
    }
    for key, verb in words.items():
        keys = told.get(key) or ()
        names = sorted(str(name[0]) if isinstance(name, tuple | list) else str(name) for name in keys)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(
                f"model.path: the weights in '{config.folder}' {verb} {names[0]}{more}; they are not those of its"
                f" {config.path.name}"
            )
