"""Forward and backward of operations that a user has written, one by one or fused, as one node of autograd.

Such an operation has fuser_forward() and fuser_backward(), or op_forward() and op_backward(), with a context between
them. Others of the same stretch are run in between, each under its own autograd.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Place = tuple[int, int]
"""(operation, slot) of an extra input or output."""
Pass = Sequence[tuple[Any, Sequence[int]]]
"""The operations of a pass in order, each with the indices of the basic operations that it computes."""


class OperationContext:
    """What a forward keeps for the backward of an operation."""

    def __init__(self, requires_grad: bool = True) -> None:
        self.requires_grad = requires_grad
        self.to_save: tuple[Tensor | None, ...] = ()
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors, which saved_tensors has in the backward."""
        self.to_save = tensors


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Basic operations in order, with the passes that compute them."""

    ops: Sequence[Any]
    forward: Pass
    backward: Pass
    sources: Mapping[Place, Place]
    """Extra input -> the extra output of an earlier operation of the stretch that it is."""

    def __call__(
        self, x: Tensor, extra_inputs: Sequence[Sequence[Tensor | None]], options: Sequence[Mapping[str, Any]]
    ) -> tuple[Tensor, list[list[Tensor | None]]]:
        """y, and the extra outputs of each operation. extra_inputs: of each; None where `sources` has one."""
        parameters = [p for op in self.ops for p in op.parameters()]
        given = [tensor for own in extra_inputs for tensor in own]
        y, *flat = _Stretch.apply(x, self, options, len(parameters), *parameters, *given)
        return y, _split(flat, [op.num_extra_outputs for op in self.ops])


def missing(op: Any) -> RuntimeError:
    """The error for an extra input that a fused operation has not returned."""
    return RuntimeError(
        f"{type(op).__name__}: a fused operation returned None for an extra output that is read outside its forward"
        " fusion"
    )


def _split(flat: Iterable[Any], counts: Sequence[int]) -> list[list[Any]]:
    """The items in lists of these lengths."""
    items = iter(flat)
    return [[next(items) for _ in range(count)] for count in counts]


class _Stretch(torch.autograd.Function):
    """A call of a Stretch. It saves what the contexts keep, and the graphs of operations without one."""

    @staticmethod
    def forward(ctx, x: Tensor, stretch: Stretch, options: Any, count: int, *tensors: Tensor | None) -> tuple:
        counts = [op.num_extra_inputs for op in stretch.ops]
        needs_dx, _, _, _, *needs = ctx.needs_input_grad
        pairs = zip(tensors[count:], needs[count:], strict=True)
        given = _split([t if t is None else t.detach().requires_grad_(wanted) for t, wanted in pairs], counts)
        ctx.call = call = _Call(stretch, given, options, any(ctx.needs_input_grad))
        y, extra = call.forward(x.detach().requires_grad_(needs_dx))
        ctx.save_for_backward(*[tensor for context in call.contexts for tensor in context.to_save])
        ctx.of_extra_inputs = counts
        return (y, *[tensor for own in extra for tensor in own])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor, *dextra: Tensor) -> tuple[Tensor | None, ...]:
        call, ops = ctx.call, ctx.call.stretch.ops
        for context, own in zip(
            call.contexts, _split(ctx.saved_tensors, [len(c.to_save) for c in call.contexts]), strict=True
        ):
            context.saved_tensors = tuple(own)
        dx, of_parameters, of_inputs = call.backward(dy, _split(dextra, [op.num_extra_outputs for op in ops]))
        found = dx, None, None, None, *_flat(of_parameters, ops, _parameters), *_flat(of_inputs, ops, _extra_inputs)
        return tuple(g if wanted else None for g, wanted in zip(found, ctx.needs_input_grad, strict=True))


def _parameters(op: Any) -> int:
    return len(list(op.parameters()))


def _extra_inputs(op: Any) -> int:
    return op.num_extra_inputs


def _flat(found: Sequence[Iterable[Any]], ops: Sequence[Any], count: Callable[[Any], int]) -> list[Any]:
    """The gradients of all operations. RuntimeError where an operation returned another number."""
    for op, own in zip(ops, found, strict=True):
        if own and len(own) != count(op):
            raise RuntimeError(f"{type(op).__name__}: backward returned {len(own)} gradients in place of {count(op)}")
    return [gradient for op, own in zip(ops, found, strict=True) for gradient in (own or [None] * count(op))]


class _Call:
    """One call of a stretch: its contexts, and what its backward needs."""

    def __init__(
        self,
        stretch: Stretch,
        given: list[list[Tensor | None]],
        options: Sequence[Mapping[str, Any]],
        requires_grad: bool,
    ) -> None:
        self.stretch, self.given, self.options, self.requires_grad = stretch, given, options, requires_grad
        self.contexts = [OperationContext(requires_grad) for _ in stretch.ops]
        self.outputs: list[Sequence[Tensor | None]] = [() for _ in stretch.ops]
        self.graphs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        fused = [index for op, places in stretch.backward if op.is_of_user for index in places]
        self.has_graph = {i for i, op in enumerate(stretch.ops) if requires_grad and i not in fused}

    def forward(self, x: Tensor) -> tuple[Tensor, list[Sequence[Tensor | None]]]:
        """y, and the extra outputs of each operation."""
        for op, places in self.stretch.forward:
            if op.is_of_user:
                if self.has_graph.intersection(places):
                    self._run_parts(places, x)
                x = self._by_user(op, places, x, self.contexts)
            else:
                x = self._by_itself(places[0], x)
        return x, self.outputs

    def _run_parts(self, places: Sequence[int], x: Tensor) -> None:
        """Run the parts of a user's forward that has no backward, for the gradient of each."""
        scratch = [OperationContext() for _ in self.stretch.ops]
        for place in places:
            op = self.stretch.ops[place]
            x = self._by_user(op, [place], x, scratch) if op.is_of_user else self._by_itself(place, x)

    def _inputs(self, index: int, places: Sequence[int]) -> list[Tensor | None]:
        """The extra inputs of an operation; None for outputs of the same fused operation."""
        found = list(self.given[index])
        for slot in range(len(found)):
            producer, output = self.stretch.sources.get((index, slot), (None, 0))
            if producer is not None and producer not in places:
                found[slot] = self.outputs[producer][output]
                if found[slot] is None:
                    raise missing(self.stretch.ops[index])
        return found

    def _by_user(self, op: Any, places: Sequence[int], x: Tensor, contexts: Sequence[OperationContext]) -> Tensor:
        """y of a user's forward. RuntimeError for another number of extra outputs."""
        y, extra = op.fuser_forward(
            [contexts[i] for i in places],
            x,
            basic_op_extra_inputs=[self._inputs(i, places) for i in places],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[self.options[i] for i in places],
        )
        counts = [self.stretch.ops[i].num_extra_outputs for i in places]
        if [len(own) for own in extra] != counts:
            raise RuntimeError(
                f"{type(op).__name__}: forward returned {[len(own) for own in extra]} extra outputs of its operations"
                f" in place of {counts}"
            )
        for index, own in zip(places, extra, strict=True):
            self.outputs[index] = [self._marked(tensor) for tensor in own]
        return y

    def _marked(self, tensor: Tensor | None) -> Tensor | None:
        """An extra output, which requires gradients where the stretch does."""
        if tensor is None or not (self.requires_grad and tensor.is_floating_point()):
            return tensor
        return tensor.detach().requires_grad_()

    def _by_itself(self, index: int, x: Tensor) -> Tensor:
        """y of an operation that has run(). Its context saves x and the parameters for a user's backward."""
        op, has_graph = self.stretch.ops[index], index in self.has_graph
        inputs = [t.detach().requires_grad_(has_graph and t.is_floating_point()) for t in [x, *self._inputs(index, ())]]
        with torch.set_grad_enabled(has_graph):
            y = op.run(*inputs, **self.options[index])
        y, *extra = y if isinstance(y, tuple) else (y,)
        if has_graph:
            self.graphs[index] = inputs, [y, *extra]
        elif self.requires_grad:
            self.contexts[index].save_for_backward(x, *op.parameters())
            self.contexts[index].dtype = y.dtype
        self.outputs[index] = [self._marked(tensor) for tensor in extra]
        return y.detach()

    def backward(self, dy: Tensor, dextra: list[list[Tensor | None]]) -> tuple[Tensor, list, list]:
        """The gradients of x, and of each operation's parameters and extra inputs."""
        of_parameters, of_inputs = [[() for _ in self.stretch.ops] for _ in range(2)]
        for op, places in reversed(self.stretch.backward):
            own = [dextra[i] for i in places]
            if op.is_of_user:
                contexts = [self.contexts[i] for i in places]
                dy, *found = op.fuser_backward(contexts, dy, basic_op_grad_extra_outputs=own)
            else:
                dy, *found = self._backward_of(places[0], [dy, *own[0]])
            for index, parameters, inputs in zip(places, *found, strict=True):
                of_parameters[index], of_inputs[index] = tuple(parameters or ()), tuple(inputs or ())
                self._hand_on(index, places, of_inputs[index], dextra)
        return dy, of_parameters, of_inputs

    def _hand_on(self, index: int, places: Sequence[int], gradients: Sequence[Any], dextra: list[list[Any]]) -> None:
        """Add gradients of extra inputs to the extra outputs that these are, but for outputs of the same fusion."""
        for slot, gradient in enumerate(gradients):
            producer, output = self.stretch.sources.get((index, slot), (None, 0))
            if producer is not None and producer not in places and gradient is not None:
                before = dextra[producer][output]
                dextra[producer][output] = gradient if before is None else before + gradient

    def _backward_of(self, index: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor, list, list]:
        """The gradients of an operation that has run()."""
        inputs, outputs = self.graphs.pop(index)
        parameters = list(self.stretch.ops[index].parameters())
        wanted = [tensor for tensor in (*inputs, *parameters) if tensor.requires_grad]
        known = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if y.requires_grad and dy is not None]
        found = torch.autograd.grad([y for y, _ in known], wanted, [dy for _, dy in known], allow_unused=True)
        by_tensor = {id(tensor): gradient for tensor, gradient in zip(wanted, found, strict=True)}
        dx, *rest = [by_tensor.get(id(tensor)) for tensor in (*inputs, *parameters)]
        return dx, [rest[len(inputs) - 1 :]], [rest[: len(inputs) - 1]]
