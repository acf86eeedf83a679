"""CompiledBlocks: the repeated blocks of a user's model, compiled by TorchInductor once for all of them.

A model of Hugging Face runs norms, rotary positions and activations as many small kernels. Compiled, a block is a few
fused ones around hqsweep's operators, and a step's CUDA graph replays these. Blocks of one class share their graphs.
Inductor is in its deterministic mode, in which no timing chooses an order of sums. So the bits of a step are a function
of model, recipe, versions and device. Its files are cached on disk, and the second run of a model compiles little.

Some steps are traced differently, or not at all. Samples of error statistics look into modules, so those steps run the
blocks as they are, beside the step itself (train.loop). States of delayed scaling and held weights would break the
graph; their models stay uncompiled.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hqsweep.models.conversion import Conversion
from hqsweep.models.held import held_parts
from hqsweep.nn.core.module import PARTS
from hqsweep.recipe.sections import slots
from hqsweep.torch_private import drop_compiled, inductor_options, raise_recompile_limit

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
