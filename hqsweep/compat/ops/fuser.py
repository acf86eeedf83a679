"""OperationFuser: operations in order, fused by functions that a user has registered, and by hqsweep's kernels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hqsweep.compat.arguments import shown
from hqsweep.compat.ops.op import BasicOperation, FusibleOperation
from hqsweep.compat.ops.passes import Pass, Place, Stretch, missing
from hqsweep.errors import UserError
from hqsweep.nn.core.context import autocast_recipe

Kernel = Callable[[Sequence[BasicOperation], Tensor], tuple[int, Any] | None]
"""(operations from here on, x) -> how many it has computed and their y, or None if it does not take them."""
FusionFunction = Callable[..., Sequence[FusibleOperation]]
"""(operations, recipe=the recipe of autocast or None) -> the operations, some of them fused."""
_REGISTERED: dict[str, list[FusionFunction]] = {"forward_backward": [], "forward": [], "backward": []}


def register_forward_fusion(func: FusionFunction, prepend: bool = False) -> None:
    """Fuse operations of forward passes by a function. It is asked after earlier functions, or first with prepend.

    It counts for the process, and for models that have not been called.
    """
    _register("forward", func, prepend)


def register_backward_fusion(func: FusionFunction, prepend: bool = False) -> None:
    """Fuse operations of backward passes by a function, as register_forward_fusion()."""
    _register("backward", func, prepend)


def register_forward_backward_fusion(func: FusionFunction, prepend: bool = False) -> None:
    """Fuse operations of both passes by a function, as register_forward_fusion(). It is asked before the others."""
    _register("forward_backward", func, prepend)


def _register(which: str, func: FusionFunction, prepend: bool) -> None:
    _REGISTERED[which].insert(0 if prepend else len(_REGISTERED[which]), func)


def _fused(ops: Sequence[FusibleOperation], which: str) -> Sequence[FusibleOperation]:
    for func in _REGISTERED[which]:
        ops = func(list(ops), recipe=autocast_recipe())
    return ops


def _as_pass(fused: Sequence[FusibleOperation], ops: Sequence[BasicOperation], method: str) -> Pass:
    """The operations of a pass. Those that lack the method are replaced by their parts.

    RuntimeError where the parts are not `ops`, in order.
    """
    own = [o for op in fused for o in ([op] if isinstance(op, BasicOperation) or _has(op, method) else op.parts)]
    found, at = [], 0
    for op in own:
        found.append((op, list(range(at, at + len(op.parts)))))
        at += len(op.parts)
    parts = [part for op in own for part in op.parts]
    if [id(part) for part in parts] != [id(op) for op in ops]:
        names = [[type(op).__name__ for op in some] for some in (parts, ops)]
        raise RuntimeError(f"a registered fusion gave the operations {names[0]} in place of {names[1]}")
    return found


def _has(op: FusibleOperation, method: str) -> bool:
    return getattr(type(op), method) is not getattr(FusibleOperation, method)


def sources(ops: Sequence[BasicOperation]) -> dict[Place, Place]:
    """Extra input -> the extra output that its channel brings. UserError for channels without a producer, or with
    two."""
    slots = [(i, *slot, channel) for i, op in enumerate(ops) for slot, (channel, _) in op.channels.items()]
    producers: dict[str, Place] = {}
    for index, side, slot, channel in slots:
        if side == "output" and channel in producers:
            raise UserError(
                f"{type(ops[index]).__name__}: channel {channel!r} has multiple producers; give each its own"
            )
        producers |= {channel: (index, slot)} if side == "output" else {}
    found = {
        (index, slot): (channel, producers.get(channel)) for index, side, slot, channel in slots if side == "input"
    }
    for (index, _), (channel, producer) in found.items():
        if producer is None or producer[0] >= index:
            earlier = "" if producer is None else "earlier "
            raise UserError(
                f"{type(ops[index]).__name__}: channel {channel!r} has no {earlier}producer in the same fuser"
            )
    return {place: producer for place, (_, producer) in found.items()}


class OperationFuser:
    """Operations that are run one after the other, or several at once by kernels.

    UserError for channels without a producer, or with two.
    """

    def __init__(self, ops: Sequence[FusibleOperation], kernels: Sequence[Kernel] = ()) -> None:
        self.ops, self.kernels = [part for op in ops for part in op.parts], kernels
        self.sources = sources(self.ops)
        for op in self.ops:
            op._captured = True
        self.num_extra_inputs = sum(len(self._own_slots(op)) for op in self.ops)
        self.forward_ops: Pass = [(op, [index]) for index, op in enumerate(self.ops)]
        self.backward_ops = self.forward_ops
        self._stretches: dict[type, dict[int, Stretch]] = {}

    @staticmethod
    def _own_slots(op: BasicOperation) -> list[int]:
        """The slots of extra inputs that the caller fills."""
        return [index for index in range(op.num_extra_inputs) if ("input", index) not in op.channels]

    def __call__(
        self, x: Tensor, *extra_inputs: Tensor, basic_op_kwargs: Sequence[Mapping[str, Any]] | None = None
    ) -> Any:
        """y, or (y, extra outputs of the caller). basic_op_kwargs: keyword arguments of each operation's call.

        UserError for another number of extra inputs.
        """
        if len(extra_inputs) != self.num_extra_inputs:
            raise UserError(f"the operations take {self.num_extra_inputs} extra inputs, and got {len(extra_inputs)}")
        options = basic_op_kwargs or [{}] * len(self.ops)
        ahead, channels, outputs, at = list(extra_inputs), {}, [], 0
        stretches = self._fused_by_user()
        while at < len(self.ops):
            op, extra = self.ops[at], []
            stretch, own = stretches.get(at), not (op.num_extra_inputs or op.num_extra_outputs)
            count, y = self._fused_by_kernels(at, x, options, stretches) if own and stretch is None else (0, None)
            if stretch is not None:
                count = len(stretch.ops)
                given = [self._inputs(i, channels, ahead, stretch, at) for i in range(at, at + count)]
                y, extra = stretch(x, given, options[at : at + count])
            elif not count:
                y, count = op.run(x, *self._inputs(at, channels, ahead), **options[at]), 1
                if op.num_extra_outputs:
                    y, *own = y
                    extra = [own]
            for part, own in zip(self.ops[at:], extra, strict=False):
                outputs += self._delivered(part, own, channels)
            x, at = y, at + count
        return (x, *outputs) if outputs else x

    def _fused_by_user(self) -> dict[int, Stretch]:
        """The first operation of a stretch -> the stretch that registered functions have fused, by the type of the
        recipe of autocast."""
        kind = type(autocast_recipe())
        if kind not in self._stretches:
            both = _fused(self.ops, "forward_backward")
            self.forward_ops = _as_pass(_fused(both, "forward"), self.ops, "fuser_forward")
            self.backward_ops = _as_pass(_fused(both, "backward"), self.ops, "fuser_backward")
            self._stretches[kind] = self._stretched()
        return self._stretches[kind]

    def _stretched(self) -> dict[int, Stretch]:
        """The stretches: fused operations of both passes that overlap are in one."""
        fused = [places for op, places in (*self.forward_ops, *self.backward_ops) if op.is_fused_op]
        bounds: list[list[int]] = []
        for first, last in sorted((places[0], places[-1]) for places in fused):
            if bounds and first <= bounds[-1][1]:
                bounds[-1][1] = max(last, bounds[-1][1])
            else:
                bounds.append([first, last])
        return {first: self._stretch(range(first, last + 1)) for first, last in bounds}

    def _stretch(self, within: range) -> Stretch:
        first = within.start
        passes = [
            [(op, [place - first for place in places]) for op, places in own if places[0] in within]
            for own in (self.forward_ops, self.backward_ops)
        ]
        inner = {
            (i - first, slot): (producer - first, output)
            for (i, slot), (producer, output) in self.sources.items()
            if i in within and producer in within
        }
        return Stretch(ops=[self.ops[i] for i in within], forward=passes[0], backward=passes[1], sources=inner)

    def _fused_by_kernels(
        self, at: int, x: Tensor, options: Sequence[Mapping[str, Any]], stretches: Iterable[int]
    ) -> tuple[int, Any]:
        """How many operations a kernel has computed, and their y."""
        until = min((first for first in stretches if first > at), default=len(self.ops))
        for fusion in self.kernels:
            found = fusion(self.ops[at:until], x)
            if found is not None and not any(options[at : at + found[0]]):
                return found
        return 0, None

    def _inputs(
        self,
        index: int,
        channels: Mapping[str, Tensor | None],
        ahead: list[Tensor],
        stretch: Stretch | None = None,
        first: int = 0,
    ) -> list[Tensor | None]:
        """The extra inputs of an operation: of the caller, or of channels. None for extra inputs of its own stretch."""
        op, found = self.ops[index], []
        for slot in range(op.num_extra_inputs):
            bound = op.channels.get(("input", slot))
            inner = stretch is not None and (index - first, slot) in stretch.sources
            found.append(None if inner else ahead.pop(0) if bound is None else channels[bound[0]])
            if found[-1] is None and not inner:
                raise missing(op)
        return found

    @staticmethod
    def _delivered(op: BasicOperation, extra: Sequence[Tensor], channels: dict[str, Tensor]) -> list[Tensor]:
        """Put extra outputs into their channels; the result has the outputs for the caller."""
        if len(extra) != op.num_extra_outputs:
            raise UserError(
                f"{type(op).__name__}: run() returned {shown(extra)} as {op.num_extra_outputs} extra outputs"
            )
        of_caller = []
        for index, value in enumerate(extra):
            channel, to_caller = op.channels.get(("output", index), (None, True))
            if value is None and to_caller:
                raise RuntimeError(f"{type(op).__name__}: extra output {index} is public, and its fusion returned None")
            if channel is not None:
                channels[channel] = value
            of_caller += [value] if to_caller else []
        return of_caller


class FusedOperation(FusibleOperation):
    """Several basic operations in one. It has no parameters of its own.

    A user's one has fuser_forward(), fuser_backward() or both, and a registered function puts it in place of its basic
    operations. Without fuser_backward() these are run as well, for their gradients. Without fuser_forward() each of
    hqsweep's operations saves its input and its parameters in its context.
    """

    kernels: Sequence[Kernel] = ()
    """What may compute several of its operations at once."""

    def __init__(self, basic_ops: Iterable[FusibleOperation]) -> None:
        super().__init__()
        self.basic_ops = nn.ModuleList(basic_ops)
        if not self.basic_ops:
            raise UserError(f"{type(self).__name__}: there are no basic operations")

    @property
    def is_fused_op(self) -> bool:
        return True

    @property
    def is_of_user(self) -> bool:
        return True

    @property
    def parts(self) -> Sequence[BasicOperation]:
        return [part for op in self.basic_ops for part in op.parts]

    def forward(self, input: Tensor, *extra_inputs: Tensor, basic_op_kwargs: Any = None) -> Any:
        """The operations by themselves."""
        return OperationFuser([self], self.kernels)(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
