"""The models of the config's section `model` that are a user's own: built, outlined on the meta device, and compiled.

An outline has shapes and no memory, for checks before anything starts. A run's config names a function alone, and the
code of that name may change: a resumed run would go on with another model. So the manifest has the code as a text,
which is equal where the code is.

CompiledBlocks are the repeated blocks of a user's model, compiled by TorchInductor once for all of them. A model of
Hugging Face runs norms, rotary positions and activations as many small kernels. Compiled, a block is a few fused ones
around hqsweep's operators, and a step's CUDA graph replays these. Blocks of one class share their graphs. Inductor is
in its deterministic mode, in which no timing chooses an order of sums. So the bits of a step are a function of model,
recipe, versions and device. Its files are cached on disk, and the second run of a model compiles little.

Some steps are traced differently, or not at all. Samples of error statistics look into modules, so those steps run the
blocks as they are, beside the step itself (train.loop). States of delayed scaling and held weights would break the
graph; their models stay uncompiled.
"""

import ast
import hashlib
import importlib.metadata
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.model import TARGET, FactoryModelConfig, HFModelConfig, UserModel
from hqsweep.config.train import Recompute
from hqsweep.errors import UserError
from hqsweep.models.conversion import Conversion
from hqsweep.models.convert import gemm_modules_of
from hqsweep.models.held import held_parts
from hqsweep.models.hf import load_model, meta_model
from hqsweep.models.hf_folder import read_hf_config
from hqsweep.models.linear import output_projection
from hqsweep.nn.core.module import PARTS
from hqsweep.recipe.factories import FactoryName
from hqsweep.recipe.products import GemmModule, attention_module, linear_module
from hqsweep.recipe.sections import slots
from hqsweep.torch_private import BatchNorm, drop_compiled, inductor_options, raise_recompile_limit


def build(config: UserModel, seed: int) -> nn.Module:
    """The model on the CPU in training mode, with weights that depend on the seed and its checkpoint alone; the
    caller's random state is restored. UserError where it cannot be had."""
    if isinstance(config, HFModelConfig):
        return load_model(config.path, pretrained=config.pretrained, seed=seed, architecture=config.architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _called(config).train()


def outline(config: UserModel) -> nn.Module | None:
    """The model without memory for its weights, on the meta device where it can be built there; None where a Python
    function builds it that this process may not import."""
    if isinstance(config, FactoryModelConfig) and _is_name(config):
        return None
    what: Any = [config.target, config.args] if isinstance(config, FactoryModelConfig) else None
    if isinstance(config, HFModelConfig):
        what = [read_hf_config(config.path).digest, config.architecture]
    key = json.dumps(what, sort_keys=True, default=str)
    if key not in _OUTLINES:
        _OUTLINES[key] = _outlined(config)
    return _OUTLINES[key]


_OUTLINES: dict[str, nn.Module] = {}
"""The outlines of this process's models: a grid asks for the same one for every recipe and seed."""


def _outlined(config: UserModel) -> nn.Module:
    if isinstance(config, HFModelConfig):
        return meta_model(read_hf_config(config.path), config.architecture)
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return _called(config)
    except UserError:  # what cannot be built there may be built with memory
        return build(config, seed=0)


def _is_name(config: FactoryModelConfig) -> bool:
    """Whether this process may not import the function."""
    return config.factory is None or isinstance(config.factory, FactoryName)


def _called(config: FactoryModelConfig) -> nn.Module:
    """Return the function's model. UserError if it raises, or returns another type."""
    where, call = f"model.{TARGET}", f"{config.target}({', '.join(f'{k}={v!r}' for k, v in config.args.items())})"
    if _is_name(config):
        raise UserError(f"{where}: {config.target} is a Python function, which is not imported here")
    try:
        model = config.factory(**config.args)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: {call} raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"{where}: {call} gave {type(model).__name__}; it must give a torch.nn.Module")
    return model


def vocab_fault(model: nn.Module, vocab_size: int) -> str | None:
    """Return why a model cannot take this many tokens, as a part of a sentence; None if it can.

    Either no embedding has enough rows, or the output projection does not.
    """
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if tables and max(tables) < vocab_size:
        return f"its embedding has {max(tables)} rows"
    head = output_projection(model)
    if head is not None and len(head.weight) < vocab_size:
        return f"its output projection has {len(head.weight)} rows"
    return None


def check_recompute(model: nn.Module, recompute: Recompute) -> None:
    """UserError for parts that a user's model cannot compute again."""
    if recompute == "attention":
        raise UserError(
            "train.recompute: attention alone is computed again by hqsweep's own GPT; give none, or layer, which a"
            " Hugging Face model does by its gradient checkpointing"
        )
    if recompute == "layer" and not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(
            f"train.recompute: layer is Hugging Face's gradient checkpointing, which {type(model).__name__} has not;"
            " give none, and torch.utils.checkpoint in the model itself"
        )


def check_ranks(model: nn.Module) -> None:
    """UserError for a user's model that would compute something else on ranks with other sequences than in one
    process."""
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm):
            raise UserError(
                f"train.parallel: {name} is a {type(module).__name__}, whose statistics of a batch each rank would have"
                " of its own; train in one process, or take another norm"
            )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UserError(
                f"train.parallel: {name} is a number, of which ranks have no parts; give it the shape [1], or train in"
                " one process"
            )


def gemm_modules(config: ConvergenceConfig, vocab_size: int) -> list[GemmModule] | None:
    """Return every module with matrix products that the config's recipe applies to, for a step of one microbatch.

    None if a Python function builds the model, and this process may not import it. UserError if the recipe could take
    no module.
    """
    if not isinstance(config.model, UserModel):
        return config.gemm_modules(vocab_size)
    model = outline(config.model)
    if model is None or config.recipe.has_names:
        return None
    options: dict[str, Any] = {"head": config.model.head, "attention": config.model.attention}
    modules = gemm_modules_of(model, config.recipe.build(), **options)
    return _in_step(modules, config.microbatch * config.train.context, config.train.context)


def _in_step(modules: Sequence[GemmModule], tokens: int, context: int) -> list[GemmModule]:
    """The modules with the rows of a step; the rows of experts are not known."""
    return [_sized(module, tokens, context) for module in modules]


def _sized(module: GemmModule, tokens: int, context: int) -> GemmModule:
    if module.module_type == "linear":
        _, out_features, in_features = module.shapes["fprop"]
        return linear_module(module.name, in_features, out_features, tokens)
    if module.module_type == "dpa" and "qk" in module.shapes:
        return attention_module(module.name, module.shapes["qk"][2], context)
    return replace(module, context=context) if module.module_type == "dpa" else module


def parameters(config: ConvergenceConfig) -> int | None:
    """The number of parameters of a user's model, where a tie counts once; None where it cannot be built here."""
    model = outline(config.model)
    return None if model is None else sum(p.numel() for p in model.parameters())


LEFT_OUT = ("torch", "hqsweep", "builtins")
"""The packages whose versions the manifest has anyway."""
INSTALLED = {"site-packages", "dist-packages"}
"""The folders of installed packages."""
DIGITS = 12


def code_of(model: nn.Module, *functions: Callable[..., Any]) -> str:
    """Return "my_package.blocks 3f2a91c0d4e7, timm 1.0.9": the modules of the functions, which build the model or
    compute its loss, and of the model's classes, sorted.

    An installed package has its version, any other file a hash of its code without comments. Functions elsewhere that
    they call are not seen.
    """
    names = {
        *(function.__module__ for function in functions),
        *(cls.__module__ for part in model.modules() for cls in type(part).__mro__),
    }
    return code_of_modules(names)


def code_of_modules(names: set[str]) -> str:
    """The text of code_of() for modules by name."""
    names = {name for name in names if name.partition(".")[0] not in LEFT_OUT}
    return ", ".join(sorted({said for name in names for said in _said(name)}))


def check_code(target: str, before: str | None, now: str) -> None:
    """Raise UserError if a run would continue from a state that other code made. before: None without such a state."""
    if before is None or before == now:
        return
    known = before.split(", ")
    other = ", ".join(entry.partition(" ")[0] for entry in now.split(", ") if entry not in known) or "a module of it"
    raise UserError(
        f"model._target_: {target} is other code than this state was trained with ({other} differs); put that back, or"
        " begin again (hqsweep rm)"
    )


def _said(name: str) -> Iterator[str]:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return
    path = Path(file).resolve()
    if not INSTALLED.isdisjoint(path.parts):
        package = name.partition(".")[0]
        for distribution in importlib.metadata.packages_distributions().get(package, [package]):
            yield f"{distribution} {_version(distribution)}"
    else:
        yield f"{name} {_digest(path)}"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of no version"


def _digest(path: Path) -> str:
    source = path.read_bytes()
    with suppress(SyntaxError, ValueError):  # of a compiled module
        source = ast.dump(ast.parse(source)).encode()
    return hashlib.sha256(source).hexdigest()[:DIGITS]


GRAPHS = 64
"""The graphs of one block's code that Dynamo keeps: kinds of layers times training and evaluation."""


class CompiledBlocks:
    """The compiled blocks of a converted model in training. why_not: why they are not compiled; None: they are.

    The first forward in training compiles. Where that fails, the blocks run as they are, and why_not says why.
    """

    def __init__(self, model: nn.Module, conversion: Conversion, backend: str = "inductor") -> None:
        self.model, self.conversion, self.backend = model, conversion, backend
        self.blocks = blocks_of(model)
        self.begin()

    @property
    def on(self) -> bool:
        return self.why_not is None

    def begin(self) -> None:
        """Compile anew at the next forward in training, for the recipe that the model has now."""
        self.why_not, self._is_tried = self._fault(), False
        for block in self.blocks:
            drop_compiled(block)
        if self.on:
            raise_recompile_limit(GRAPHS)
            options = inductor_options() if self.backend == "inductor" else None
            for block in self.blocks:
                block.compile(fullgraph=True, dynamic=False, backend=self.backend, options=options)

    def try_once(self, forward: Callable[[], Tensor], say: Callable[[str], None]) -> None:
        """Compile by a forward and backward, whose gradients are dropped, and a forward in evaluation, if that was not
        done yet.

        forward: returns the loss of a true microbatch. say: is given a sentence about the result. Buffers and the
        states of torch's generators are as before.
        """
        if not self.on or self._is_tried:
            return
        self._is_tried, start = True, time.perf_counter()
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        try:
            with torch.random.fork_rng(devices=self._devices()):
                forward().backward()
                with torch.no_grad():
                    self.model.eval()
                    forward()
        except Exception as error:  # Dynamo and Inductor raise anything, and so does a model that they do not fit
            self._drop(_first_line(error))
        finally:
            self.model.train()
            self.model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        say(f"compile: {self}" + (f", in {time.perf_counter() - start:.0f} s" if self.on else ""))

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Within this context the blocks run as they are."""
        if not self.on:
            yield
            return
        with torch.compiler.set_stance("force_eager"):
            yield

    def __str__(self) -> str:
        """What is compiled, or why nothing is."""
        if not self.on:
            return f"nothing, since {self.why_not}"
        kinds = Counter(type(block).__name__.partition("[")[0] for block in self.blocks)
        return f"{', '.join(f'{count} {name}' for name, count in kinds.items())} by TorchInductor"

    def _devices(self) -> list[torch.device]:
        """The GPU whose generator the model draws from, if any."""
        device = next(self.model.parameters()).device
        return [device] if device.type == "cuda" else []

    def _drop(self, why: str) -> None:
        self.why_not = why
        for block in self.blocks:
            drop_compiled(block)

    def _fault(self) -> str | None:
        if not self.blocks:
            return "the model has no list of blocks of one class with linears"
        if any(True for _ in held_parts(self.model)):
            return "its weights are held quantized"
        parts = [part.module for part in self.conversion.parts]
        if any(q is not None and q.delayed for part in parts for q in slots(part.quantizers).values()):
            return "its recipe has delayed scaling"
        return None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost members of nn.ModuleList and nn.Sequential that have converted linears and a class in common.

    A class with one member in its list is left out: nothing would share its graph.
    """
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for container in model.modules():
        if container in inside or not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        counts = Counter(type(member) for member in container)
        for member in container:
            if counts[type(member)] > 1 and member not in inside and _computes(member):
                found.append(member)
                inside.update(member.modules())
    return found


def _computes(block: nn.Module) -> bool:
    """Whether a block is more than one converted module, and has one."""
    return PARTS not in block.__dict__ and any(PARTS in module.__dict__ for module in block.modules())


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return f"a trial raised {type(error).__name__}: {text}"
