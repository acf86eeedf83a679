"""Causal language models of Hugging Face: loading, their loss, and attention without a mask.

Nothing is downloaded, and code that lies beside weights is never run. transformers takes seconds to import: only these
functions import it.

unpacked() is for rows that hold one sequence each. transformers looks into position_ids for several sequences in one
row. Run eagerly it finds none, and leaves attention to the kernels for causal attention. In a CUDA graph, or under
torch.compile, it cannot look, and gives the kernels a mask [B, 1, T, T] instead. All pairs of tokens are computed then,
half of them in vain, and sums have another order: a step in a graph has other bits than without.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.models.hf_folder import HFConfig, one_line, quietly, read_hf_config, transformers
from hqsweep.quant.serialize import load_safetensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path_or_config: str | Path,
    *,
    pretrained: bool = True,
    dtype: str = "float32",
    seed: int = 0,
    architecture: str = "causal",
) -> Any:
    """A causal language model in training mode, on the CPU, its parameters in `dtype`.

    architecture: "own" gives the class that config.json names instead, such as an image classifier's.

    path_or_config: a folder with config.json and safetensors, a .safetensors file with config.json beside it, or a
    .gguf file, which is read once and kept (models.hf_folder). With pretrained=False it may be a config.json; the
    seed then makes random weights, and the caller's random state is restored.

    Raises:
        UserError: there is no such model; transformers is not installed or does not know it; weights are missing, or
            have other names or shapes than the config says.
    """
    if dtype not in DTYPES:
        raise UserError(f"load_model: dtype got {dtype!r}; must be one of {', '.join(DTYPES)}")
    config = read_hf_config(path_or_config)
    auto = model_class(config, architecture)
    if not pretrained:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _explained(config, _of_config(auto), hf_config(config), dtype=DTYPES[dtype]).train()
    options = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # _check_loaded names them
    folder = str(config.folder) if config.weights is None or config.weights.name == "model.safetensors" else None
    if folder is None:
        options |= {"config": hf_config(config), "state_dict": load_safetensors(config.weights)}
        auto = type(meta_model(config, architecture))
    with quietly():
        model, told = _explained(config, partial(auto.from_pretrained, folder, dtype=DTYPES[dtype], **options))
    _check_loaded(config, told)
    return model.train()


def model_class(config: HFConfig, architecture: str = "causal") -> Any:
    """transformers' class of the model: the causal language model's, or with "own" the first of `architectures` in
    config.json. UserError for an architecture that transformers does not have."""
    if architecture == "causal":
        return transformers().AutoModelForCausalLM
    named = next(iter(config.keys.get("architectures") or ()), None)
    found = getattr(transformers(), named, None) if isinstance(named, str) else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UserError(
            f"model.architecture: own, but '{config.path}' names {named!r} in `architectures`, which transformers does"
            " not have; name a class there, such as ViTForImageClassification"
        )
    return found


def _of_config(auto: Any) -> Callable[..., Any]:
    """The function that gives a model with random weights of a config. Classes of models have a private one alone."""
    return auto.from_config if hasattr(auto, "from_config") else auto._from_config


def meta_model(config: HFConfig, architecture: str = "causal") -> Any:
    """The model of a config without memory for its weights."""
    own = hf_config(config)
    with torch.device("meta"):
        return _explained(config, _of_config(model_class(config, architecture)), own, dtype=torch.float32)


def one_layer(path: str | Path, most: int) -> Any:
    """The model of a config with one layer and random weights; None where transformers cannot build it, or where it has
    more than `most` parameters. The caller's random state is restored."""
    config, auto = hf_config(read_hf_config(path)), transformers().AutoModelForCausalLM
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
    """transformers' own object of a config. UserError for an unknown type of model."""
    auto = transformers().AutoConfig
    return _explained(config, auto.from_pretrained, str(config.path), local_files_only=True, trust_remote_code=False)


Around = Callable[[], AbstractContextManager]
"""A context that a model's forward runs in."""


def causal_lm_loss(
    model: nn.Module, inputs: Tensor, targets: Tensor, around: Around = nullcontext
) -> tuple[Tensor, Tensor | None]:
    """Return (cross entropy, auxiliary loss), each [] and in nats, as the model defines them. A training minimizes
    their sum.

    inputs, targets: int64 [B, T]. targets[b, t] is the token after inputs[b, t]: nothing is shifted again. A row is one
    sequence (unpacked). The auxiliary loss is the term of a mixture with output_router_logits; else it is None. around:
    the context of the forward, such as head_loss.HeadLoss.
    """
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


def _explained(config: HFConfig, function: Any, *args: Any, **options: Any) -> Any:
    """Call transformers, which may raise anything, and raise that as a UserError of one line, which names the
    config."""
    try:
        return function(*args, **options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"model.path: '{config.path}' ({config.model_type}): {one_line(error)}") from None


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


FIND, EXPORTS, TRACES = "find_packed_sequence_indices", "is_torchdynamo_exporting", "is_tracing"
"""Functions of transformers.masking_utils. FIND looks for packed sequences. EXPORTS is answered wrongly by torch before
2.14 within torch.compile: masks were then never left out. Transformers before 5.18 lacks EXPORTS and asks TRACES, also
where there is no mask."""


@contextmanager
def unpacked() -> Iterator[None]:
    """A context for forwards on rows with one sequence each, also in a CUDA graph or under torch.compile.

    There is no attention_mask, and position_ids do not begin anew within a row. Attention that needs a mask for other
    reasons, such as a sliding window, still has it. Models of other libraries are not affected.

    Raises UserError for packed rows in an eager forward; a graph cannot look.
    """
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    if not all(hasattr(masking_utils, name) for name in (FIND, TRACES)):
        yield
        return
    _enter(masking_utils)
    try:
        yield
    finally:
        _leave(masking_utils)


_LOCK = Lock()
_WITHIN: list[dict[str, Any]] = []
"""transformers' own functions, once for each use that is under way, of any thread."""


def _enter(masking_utils: ModuleType) -> None:
    with _LOCK:
        own = _WITHIN[0] if _WITHIN else {name: getattr(masking_utils, name) for name in _replacements()}
        _WITHIN.append(own)
        masking_utils.__dict__.update(_replacements())


def _leave(masking_utils: ModuleType) -> None:
    with _LOCK:
        own = _WITHIN.pop()
        if not _WITHIN:
            masking_utils.__dict__.update(own)


@cache
def _replacements() -> dict[str, Callable[..., Any]]:
    """The functions that replace transformers' own; the same objects each time, because torch.compile has traced for
    these."""
    from transformers import masking_utils

    find, traces = getattr(masking_utils, FIND), getattr(masking_utils, TRACES)

    def none_packed(position_ids: Tensor) -> None:
        if not masking_utils.is_tracing(position_ids) and find(position_ids) is not None:
            raise UserError("unpacked: position_ids begins anew within a row, which so holds several sequences")

    def traces_mask(mask: Tensor | None = None) -> bool:
        return mask is not None and traces(mask)

    return {FIND: none_packed} | (
        {EXPORTS: lambda: False} if hasattr(masking_utils, EXPORTS) else {TRACES: traces_mask}
    )
