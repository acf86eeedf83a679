"""Random right and wrong calls of every operator of torch.ops.hqsweep: `Call(seed)` is one.

Run as a program, `operator_cases.py FIRST COUNT EXTENSION`, it makes COUNT calls, every third of the extension itself
(binding_cases.py), and prints what came of them as JSON. Every call returns, or raises one sentence. The number of the
call that runs is in the file named by HQSWEEP_FUZZ_AT, so that whoever started the program knows where it ended.
EXTENSION: the compiled module to test.
"""

import importlib
import json
import os
import pkgutil
import random
import sys
import traceback
from collections.abc import Callable
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from cases import COMBINED, HIGH, REPRESENTATIVE
from support.fuzz import extension_file
from support.fuzz.binding_cases import BindingCall
from torch import Tensor

BY_HAND = ("quantize", "find_amax_", "dequantize", "split_offsets", "attention_on_cpu")
"""Operators that have a kernel for the CPU."""
FORMATS = tuple(text for text in (*REPRESENTATIVE, *COMBINED) if text not in HIGH)
NO_FORMATS = ("", "bf16", "fp32", "nvpf4", "mxfp8|nvfp4", "\0", "mxfp8+")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OTHER_DTYPES = (torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.int8)
NUMBERS = (-(2**63), -(2**40), -33, -1, 0, 1, 2, 31, 33, 2**31, 2**40, 2**59, 2**62, 2**63 - 1)
REFUSALS = (ValueError, RuntimeError, OverflowError, MemoryError)
"""What a refused call raises; the dispatcher's own are RuntimeErrors."""


@cache
def registered() -> tuple[str, ...]:
    """Every operator of the library."""
    import hqsweep.gemm
    import hqsweep.ops
    import hqsweep.parallel.wire.tokens

    for package in (hqsweep.ops, hqsweep.gemm):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return tuple(sorted(name for library, _, name in names if library == "hqsweep"))


@cache
def only_cuda() -> tuple[str, ...]:
    """Operators without a kernel for the CPU, for which every call of them is refused."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return tuple(name for name in registered() if not has_kernel(f"hqsweep::{name}", "CPU"))


class Call:
    """One call; `wrong`: how often something of it was changed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.wrong = 0
        self.name = self.rng.choice((*BY_HAND[:3] * 4, *BY_HAND[3:], *only_cuda()))
        torch.manual_seed(seed)
        self.arguments: list[Any] = getattr(self, f"_{self.name}", self.of_schema)()

    def run(self) -> None:
        getattr(torch.ops.hqsweep, self.name)(*self.arguments)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(described, self.arguments))})"

    # ---- what is drawn -----------------------------------------------------------------------------------------------

    def maybe(self, right: Any, change: Callable[[Any], Any], share: float = 0.06) -> Any:
        """The right argument, or seldom a changed one."""
        if self.rng.random() >= share:
            return right
        self.wrong += 1
        return change(right)

    def format(self) -> str:
        return self.maybe(self.rng.choice(FORMATS), lambda _: self.rng.choice(NO_FORMATS))

    def number(self, right: int) -> int:
        return self.maybe(right, lambda n: self.rng.choice((*NUMBERS, n - 1, n + 1, 2 * n)))

    def numbers(self, right: list[int]) -> list[int]:
        change = self.rng.choice((lambda n: n[:-1], lambda n: [*n, 1], lambda n: [self.rng.choice(NUMBERS) for _ in n]))
        return self.maybe(right, change)

    def tensor(self, right: Tensor | None) -> Tensor | None:
        return right if right is None else self.maybe(right, self.damaged)

    def damaged(self, x: Tensor) -> Tensor:
        """Fewer entries, another dtype, gaps, other axes, no storage, more elements than memory."""
        flat = x.reshape(-1)
        return self.rng.choice((
            lambda: flat[: flat.numel() // 2],
            lambda: flat[:0],
            lambda: flat[:-1] if flat.numel() else flat,
            lambda: x.to(self.rng.choice(OTHER_DTYPES)) if not x.is_complex() else flat,
            lambda: torch.stack([flat, flat], 1)[:, 0],
            lambda: x.t() if x.dim() == 2 else x[None],
            lambda: x[None],
            lambda: x.new_zeros(()),
            lambda: x.new_zeros((1, 1)).expand(2**31, 2**31),
            lambda: emptied(x),
        ))()  # fmt: skip

    def sides(self) -> tuple[int, int]:
        """Rows and columns that every format takes."""
        return 16 * self.rng.choice((0, 1, 1, 2, 3, 8, 9)), 16 * self.rng.choice((0, 1, 2, 2, 5, 8, 9))

    def matrix(self, rows: int, cols: int) -> Tensor:
        x = torch.randn(rows, cols)
        if self.rng.random() < 0.3:
            x = torch.randn(cols, rows).t()
        return x.to(self.rng.choice(DTYPES))

    def members(self, rows: int) -> tuple[Tensor | None, list[int] | None]:
        """Offsets and sizes, or neither."""
        if self.rng.random() < 0.5:
            return None, None
        sizes = self.split(rows, self.rng.randint(1, 5), 16)
        offsets = self.tensor(torch.tensor([0, *accumulate(sizes)]))
        if offsets.dtype == torch.int64 and offsets.dim() == 1 and shown(offsets):
            offsets = torch.tensor(self.maybe(offsets.tolist(), self.shifted), dtype=torch.int64)
            other = [0, *accumulate(self.split(rows, len(sizes), 1))]
            offsets = self.maybe(offsets, lambda _: torch.tensor(other), 0.15)
        return offsets, self.maybe(sizes, self.shifted) if self.rng.random() < 0.6 else None

    def split(self, rows: int, count: int, unit: int) -> list[int]:
        """So many sizes that add up to the rows, multiples of the unit."""
        edges = sorted(unit * self.rng.randint(0, rows // unit) for _ in range(count - 1))
        return [end - start for start, end in pairwise((0, *edges, rows))]

    def shifted(self, numbers: list[int]) -> list[int]:
        """One of the numbers is another."""
        changed = list(numbers)
        if changed:
            at = self.rng.randrange(len(changed))
            changed[at] += self.rng.choice((-64, -16, -1, 1, 7, 16, 2**31, -(2**40), 2**62 - 1))
        return changed

    def amaxes(self, text: str, rows: int, cols: int, column: bool, offsets: Tensor | None) -> Tensor | None:
        """As many amaxes as a format has; None where it has none."""
        if not text.startswith(("fp8_current", "fp8_delayed", "nvfp4")):
            return self.maybe(None, lambda _: torch.ones(1))
        members = count_of(offsets)
        count = members if "row_scaled" not in text else (members * cols if column else rows)
        return self.tensor(torch.ones(count))

    def keys(self, offsets: Tensor | None) -> Tensor | None:
        if offsets is None:
            return self.maybe(None, lambda _: torch.zeros(1, 2, dtype=torch.int32), 0.02)
        return self.tensor(torch.ones(count_of(offsets), 2, dtype=torch.int32))

    # ---- the operators -----------------------------------------------------------------------------------------------

    def _quantize(self) -> list[Any]:
        rows, cols = self.sides()
        offsets, sizes = self.members(rows)
        texts, flag = (self.format(), self.format()), self.rng.choice
        amaxes = [self.amaxes(text, rows, cols, bool(i), offsets) for i, text in enumerate(texts)]
        for i, text in enumerate(texts):
            if "delayed" not in text and self.rng.random() < 0.6:
                amaxes[i] = None
        keys = [self.numbers([1, 2**32 - 1, 3]) for _ in texts]
        statistics = offsets is None and flag((True, False))
        options = [flag((True, False)) for _ in range(3)]
        return [
            self.tensor(self.matrix(rows, cols)), *texts, *options, *keys, *amaxes,
            self.maybe(statistics, lambda s: not s), offsets, sizes, self.keys(offsets), self.keys(offsets),
            offsets is not None and flag((True, False)),
        ]  # fmt: skip

    def _find_amax_(self) -> list[Any]:
        rows, cols = self.sides()
        offsets, _ = self.members(rows)
        texts = [self.rng.choice(("fp8_current", "nvfp4", "nvfp4+row_scaled", "nvfp4+tensor")) for _ in range(2)]
        texts = [self.maybe(text, lambda _: self.rng.choice((*FORMATS, *NO_FORMATS))) for text in texts]
        amax, row, column = (self.amaxes(texts[i], rows, cols, bool(i), offsets) for i in (0, 0, 1))
        amax = amax if self.rng.random() < 0.3 else None
        dequantized, key = self.rng.random() < 0.3, self.numbers([1, 2, 3])
        return [self.tensor(self.matrix(rows, cols)), *texts, dequantized, key, amax, row, column, offsets,
                self.keys(offsets)]  # fmt: skip

    def _dequantize(self) -> list[Any]:
        from hqsweep.formats import parse

        (rows, cols), text = self.sides(), self.rng.choice(FORMATS)
        offsets, sizes = self.members(rows)
        columnwise = offsets is not None and self.rng.random() < 0.5
        buffers = list(parse(text).empty(rows, cols, "cpu").values())
        if offsets is not None:
            buffers = self.packed(text, (rows, cols), columnwise, offsets, sizes)
        for buffer in buffers:
            if buffer.dtype == torch.uint8:
                buffer.random_()
        buffers = self.maybe([self.tensor(b) for b in buffers], self.changed)
        format = self.maybe(text, lambda _: self.rng.choice((*FORMATS, *NO_FORMATS)))
        dtype = self.maybe(self.rng.choice(DTYPES), lambda _: self.rng.choice(OTHER_DTYPES))
        sizes, exact = (self.number(rows), self.number(cols)), self.rng.random() < 0.5
        return [buffers, format, *sizes, exact, dtype, offsets, self.maybe(columnwise, lambda c: not c)]

    def packed(
        self, text: str, shape: tuple[int, int], columnwise: bool, offsets: Tensor, sizes: list[int] | None
    ) -> list[Tensor]:
        """Buffers of members of these sizes, or room for any."""
        from hqsweep.ops.quantize.operators import Matrices, Wanted, allocations

        wanted, exact = (
            Wanted(text, columnwise, False, False),
            sizes is not None and 0 <= min(sizes) <= max(sizes) < 1000,
        )
        shapes = allocations(Matrices(*shape, count_of(offsets), tuple(sizes) if exact else None), wanted, False)
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]

    def changed(self, buffers: list[Tensor]) -> list[Tensor]:
        """One less, one more, none, or in another order."""
        return self.rng.choice((buffers[:-1], [*buffers, buffers[0]], [*buffers, *buffers], [], buffers[::-1]))

    def _split_offsets(self) -> list[Any]:
        splits = torch.randint(0, 99, (self.rng.randint(0, 9),), dtype=self.rng.choice((torch.int32, torch.int64)))
        rules = self.rng.randint(0, 8)
        divisors = self.numbers([self.rng.choice((0, 1, 16, 128)) for _ in range(rules)])
        strides = self.numbers([self.rng.choice((0, 1, 5, 2**40)) for _ in range(rules)])
        return [self.tensor(splits), divisors, strides, self.rng.random() < 0.5]

    def _attention_on_cpu(self) -> list[Any]:
        shape, dtype = [self.rng.randint(1, 3), self.rng.randint(1, 3), 8, 16], self.rng.choice(DTYPES)
        return [*(self.tensor(torch.randn(shape).to(dtype)) for _ in range(3)), self.rng.random() < 0.5]

    def of_schema(self) -> list[Any]:
        """Arguments of the types that the operator's schema gives."""
        values = {
            "Tensor": torch.ones(4, 8).bfloat16(),
            "float": 1.5,
            "bool": True,
            "str": "silu",
            "ScalarType": torch.float32,
        }
        schema = getattr(torch.ops.hqsweep, self.name).default._schema
        kinds = [str(argument.real_type) for argument in schema.arguments]
        return [self.tensor(values[kind]) if kind == "Tensor" else values.get(kind) for kind in kinds]


def emptied(x: Tensor) -> Tensor:
    """A tensor whose storage was freed, as sharding frees gathered parameters."""
    copy = x.detach().clone()
    copy.untyped_storage().resize_(0)
    return copy


def shown(x: Tensor) -> bool:
    """Whether its entries can be read, and are few."""
    return x.numel() < 100 and x.untyped_storage().nbytes() > 0


def count_of(offsets: Tensor | None) -> int:
    """Members of offsets, which may be damaged."""
    return 1 if offsets is None else min(max(offsets.numel() - 1, 0), 64)


def described(argument: Any) -> str:
    if isinstance(argument, list) and argument and isinstance(argument[0], Tensor):
        return f"[{', '.join(map(described, argument))}]"
    if not isinstance(argument, Tensor):
        return repr(argument)
    values = f" {argument.tolist()}" if argument.numel() < 8 and shown(argument) else ""
    return f"<{argument.dtype} {tuple(argument.shape)} strides {argument.stride()}{values}>"


def outcome(call: "Call | BindingCall") -> str:
    """ "ran", "refused", or what is wrong with how the call ended."""
    try:
        call.run()
    except REFUSALS as error:
        sentence = str(error)
        if not sentence or "incompatible function arguments" in sentence or "unpack" in sentence:
            return f"refused without a sentence: {sentence[:200]!r}"
        expected = call.wrong or call.name in only_cuda()
        return "refused" if expected else f"nothing is wrong with it: {sentence[:200]!r}"
    except Exception as error:
        out_of_range = isinstance(call, BindingCall) and call.wrong and isinstance(error, TypeError)
        return "refused" if out_of_range else traceback.format_exc(limit=-3)
    return "wrong, and it ran" if isinstance(call, BindingCall) and call.wrong else "ran"


def main(first: int, count: int, extension: str) -> None:
    module = extension_file.use(extension)
    torch.set_num_threads(2)
    counts: dict[str, int] = {"ran": 0, "refused": 0}
    right, names, faults = 0, set(), []
    at = os.open(os.environ["HQSWEEP_FUZZ_AT"], os.O_WRONLY)
    for seed in range(first, first + count):
        os.pwrite(at, b"%20d" % seed, 0)
        call = Call(seed) if seed % 3 else BindingCall(seed, module)
        end = outcome(call)
        names.add(call.name)
        if end not in counts:
            faults.append(f"{seed}: {call}\n{end}")
            continue
        counts[end] += 1
        right += end == "ran" and not call.wrong
    print(json.dumps({**counts, "right": right, "names": sorted(names), "faults": faults[:10]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
