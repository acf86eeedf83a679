"""Sequential: modules in order, of which neighbouring operations are run together."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from torch import Tensor, nn

from hqsweep.compat.ops.basic_linear import BasicLinear
from hqsweep.compat.ops.fuser import OperationFuser
from hqsweep.compat.ops.op import BasicOperation, FusibleOperation
from hqsweep.errors import UserError


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
        return [OperationFuser(group) if isinstance(group, list) else group for group in groups]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_groups": None}
