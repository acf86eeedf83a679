"""Sequential: operations and modules in order; and Linear, which is two operations. Both use hqsweep's kernels.

Fused are: a norm with the product that reads it; a product with its bias; two products in bfloat16 with the GELU or
SwiGLU between them, on a GPU. All results have the bytes of the operations one by one, but for a bias under
torch.autocast, which is rounded to its dtype first.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from hqsweep.compat.ops.activations import Activation
from hqsweep.compat.ops.basic_linear import BasicLinear, Bias
from hqsweep.compat.ops.fuser import FusedOperation, Kernel, OperationFuser
from hqsweep.compat.ops.norms import NormOperation
from hqsweep.compat.ops.op import BasicOperation, FusibleOperation, dtype_of
from hqsweep.errors import UserError
from hqsweep.nn.core.call import NOTHING
from hqsweep.nn.layernorm_linears import joined, joins, normed_for
from hqsweep.ops.elementwise import INPUTS
from hqsweep.ops.quantize.kernels import in_dtype


def _norm_and_product(ops: Sequence[BasicOperation], x: Tensor) -> tuple[int, Tensor] | None:
    """norm, product (, bias): the norm's kernel quantizes, or finds amaxes, for the product."""
    if len(ops) < 2 or not isinstance(ops[0], NormOperation) or not _is_whole(ops[1]):
        return None
    norm, linear = ops[:2]
    if len(norm.normalized_shape) > 1 or norm.weight.dtype is not linear.weight.dtype:
        return None
    x = linear.take(in_dtype(x, dtype_of(x, norm.weight)))
    _, h, known = normed_for(linear, norm, x, None)
    return _product(ops[1:], h, known, 1)


def _mlp(ops: Sequence[BasicOperation], x: Tensor) -> tuple[int, Tensor] | None:
    """product, GELU or SwiGLU, product, in bfloat16 on a GPU."""
    if len(ops) < 3 or not isinstance(ops[1], Activation) or not (_is_whole(ops[0]) and _is_whole(ops[2])):
        return None
    fc1, activation, fc2 = ops[:3]
    alone = not activation.num_extra_inputs and getattr(activation, "glu_interleave_size", None) is None
    if (
        not (alone and getattr(activation, "kind", None) in INPUTS)
        or fc1.waiting is not None
        or fc2.waiting is not None
    ):
        return None
    x = fc1.take(in_dtype(x, dtype_of(x, fc1.weight)))
    fc2.set_dtype(x.dtype)
    return (3, joined(fc1, x, fc2, activation.kind)) if joins(fc1, fc2, activation.kind, x) else None


def _with_bias(ops: Sequence[BasicOperation], x: Tensor) -> tuple[int, Tensor] | None:
    """product, bias."""
    if len(ops) < 2 or not _is_whole(ops[0]) or not isinstance(ops[1], Bias):
        return None
    return _product(ops, x, NOTHING, 0)


def _is_whole(op: BasicOperation) -> bool:
    """Whether it is a product that ranks do not share."""
    return isinstance(op, BasicLinear) and op.parallel is None


def _product(ops: Sequence[BasicOperation], x: Tensor, known: Any, before: int) -> tuple[int, Tensor]:
    """y of the product, and of the bias after it, if there is one."""
    biased = len(ops) > 1 and isinstance(ops[1], Bias) and ops[1].bias.dtype is ops[0].weight.dtype
    y = ops[0].run(x, bias=ops[1].bias if biased else None, known=known)
    return before + 1 + biased, y


KERNELS: tuple[Kernel, ...] = (_mlp, _norm_and_product, _with_bias)
"""What is tried at each operation, in this order."""


class Linear(FusedOperation):
    """y = x @ weight.T (+ bias): a BasicLinear and a Bias, by their arguments.

    Its state_dict has basic_ops.0.weight and basic_ops.1.bias. UserError for a bias of ranks that share the linear.
    """

    kernels = KERNELS

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        **options: Any,
    ) -> None:
        if bias and tensor_parallel_mode is not None:
            raise UserError(f"ops.Linear: tensor_parallel_mode={tensor_parallel_mode!r} takes no bias; give bias=False")
        options |= {"dtype": dtype, "tensor_parallel_mode": tensor_parallel_mode}
        linear = BasicLinear(in_features, out_features, **options)
        super().__init__([linear, Bias(out_features, dtype=dtype)] if bias else [linear])

    @property
    def weight(self) -> Tensor:
        """The weight [out_features, in_features]."""
        return self.basic_ops[0].weight

    @weight.setter
    def weight(self, weight: nn.Parameter) -> None:
        self.basic_ops[0].weight = weight

    @property
    def bias(self) -> Tensor | None:
        """The bias [out_features], or None."""
        return self.basic_ops[1].bias if len(self.basic_ops) > 1 else None


class Sequential(nn.Module):
    """Modules in order, as torch.nn.Sequential, with the operations of hqsweep.compat.ops fused where kernels do.

    A call takes the extra inputs of its operations after x, and returns their extra outputs after y. Linears without a
    name of their own get their place as name: "1.linear".
    """

    def __init__(self, *args: nn.Module | Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._groups: list[OperationFuser | nn.Module] | None = None
        if len(args) == 1 and isinstance(args[0], Mapping):
            for key, module in args[0].items():
                self.add_module(key, module)
        else:
            self.extend(args)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module at the end, or replace the one of this name."""
        self._groups = None
        for op in getattr(module, "parts", ()):
            if isinstance(op, BasicLinear) and op.name == "linear":
                op.name = f"{name}.linear"
        super().add_module(name, module)

    def _keys(self, index: int | slice) -> list[str]:
        keys = list(self._modules)
        if isinstance(index, slice):
            return keys[index]
        if not -len(keys) <= index < len(keys):
            raise IndexError(f"Attempted to access index {index}, but there are {len(keys)} entries")
        return [keys[index]]

    def _next_key(self) -> str:
        return str(max([-1, *(int(key) for key in self._modules if key.isdigit())]) + 1)

    def __getitem__(self, index: int | slice) -> Any:
        found = [self._modules[key] for key in self._keys(index)]
        return Sequential(*found) if isinstance(index, slice) else found[0]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        self.add_module(self._keys(index)[0], module)

    def __delitem__(self, index: int | slice) -> None:
        self._groups = None
        for key in self._keys(index):
            del self._modules[key]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())

    def __iadd__(self, modules: Iterable[nn.Module]) -> Self:
        return self.extend(modules)

    def __add__(self, modules: Iterable[nn.Module]) -> "Sequential":
        return Sequential(*self, *modules)

    def append(self, module: nn.Module) -> Self:
        """Add a module at the end."""
        self.add_module(self._next_key(), module)
        return self

    def extend(self, modules: Iterable[nn.Module]) -> Self:
        """Add modules at the end."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: nn.Module) -> Self:
        """Add a module before the one at an index."""
        keys = [*self._keys(slice(index, None)), self._next_key()]
        moved = [module, *(self._modules[key] for key in keys[:-1])]
        for key, own in zip(keys, moved, strict=True):
            self.add_module(key, own)
        return self

    def pop(self, index: int | slice) -> Any:
        """Remove a module, and return it."""
        found = self[index]
        del self[index]
        return found

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        op_kwargs: Mapping[nn.Module | int, Mapping[str, Any]] | None = None,
    ) -> Any:
        """y, or (y, extra outputs). op_kwargs: operation, or its index -> keyword arguments of its call."""
        if self._groups is None:
            self._groups = self._grouped()
        options = self._options(op_kwargs or {})
        x, extra, outputs = input, list(extra_inputs), []
        for group in self._groups:
            if not isinstance(group, OperationFuser):
                x = group(x)
                continue
            own, extra = extra[: group.num_extra_inputs], extra[group.num_extra_inputs :]
            y = group(x, *own, basic_op_kwargs=[options.pop(id(op), {}) for op in group.ops])
            x, *given = y if isinstance(y, tuple) else (y,)
            outputs += given
        if extra or options:
            raise UserError(
                f"Sequential: {len(extra)} extra inputs too many"
                if extra
                else "Sequential: op_kwargs has an operation that is not in it"
            )
        return (x, *outputs) if outputs else x

    def _options(self, op_kwargs: Mapping[Any, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        """id of an operation -> keyword arguments of its call. UserError for a module that takes none."""
        chosen = {self[key] if isinstance(key, int) else key: given for key, given in op_kwargs.items()}
        for module in chosen:
            if not isinstance(module, BasicOperation):
                raise UserError(f"Sequential: op_kwargs are for a BasicOperation, not for {type(module).__name__}")
        return {id(module): given for module, given in chosen.items()}

    def _grouped(self) -> list[OperationFuser | nn.Module]:
        groups: list[list[FusibleOperation] | nn.Module] = []
        for module in self:
            if not isinstance(module, FusibleOperation):
                groups.append(module)
            elif groups and isinstance(groups[-1], list):
                groups[-1].append(module)
            else:
                groups.append([module])
        return [OperationFuser(group, KERNELS) if isinstance(group, list) else group for group in groups]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_groups": None}
