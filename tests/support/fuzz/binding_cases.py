"""Random right and wrong calls of the compiled extension itself, which takes addresses: `BindingCall(seed)` is one.

Arrays are as large as a call says. One argument of a wrong call is a number or an address that no call can have, so
that it must be refused; what an address leads to, nobody but the caller can know.
"""

import random
from typing import Any

import torch
from torch import Tensor

SPECS = (
    {"family": "mx", "element": "e4m3", "tile_rows": 1, "tile_cols": 32},
    {"family": "mx", "element": "e2m1", "tile_rows": 32, "tile_cols": 32},
    {"family": "block", "element": "e5m2", "tile_rows": 128, "tile_cols": 128},
    {"family": "current", "element": "e4m3", "tile_rows": 0, "tile_cols": 0},
    {"family": "nvfp4", "element": "e2m1", "tile_rows": 1, "tile_cols": 16, "sr": True, "rht": 16},
    {"family": "nvfp4", "element": "e2m1", "tile_rows": 16, "tile_cols": 16, "four_over_six": "mse"},
)
NAMES = (
    "quantize_cpu", "find_amax_cpu", "dequantize_cpu", "offsets_cpu", "Spec", "Direction", "cast_elements",
    "decode_elements", "e8m0_up", "e8m0_scale", "stochastic_e2m1", "philox",
)  # fmt: skip
COUNTS = (-1, -(2**40), 2**60, 2**63 - 1)
WRONG: dict[str, tuple[Any, ...]] = {
    "dtype": (-1, 3, 7, 2**31 - 1),
    "out_dtype": (-1, 3, 2**31 - 1),
    "rows": COUNTS,
    "cols": COUNTS,
    "n": COUNTS,
    "count": (-1, 2**60, 2**63 - 1),
    "members": (-1, 2**31, 2**40),
    "row_stride": (2**60, -(2**60), -(2**63)),
    "col_stride": (2**60, -(2**60), -(2**63)),
    "threads": (0, -1, -(2**31)),
    "isa": ("sve", "avx1024", "\0", " "),
    "exact_dtype": (-1, 2, 9),
    "key0": (-1, 2**32, 2**63 - 1),
    "key1": (-1, 2**32),
    "step": (-1, 2**64),
    "element": ("", "e9m9", "\0"),
    "rounding": ("", "down"),
    "family": ("", "fp8"),
    "tile_rows": (-1, 7, 2**31 - 1),
    "tile_cols": (-1, 5, 2**31 - 1),
    "four_over_six": ("", "max"),
    "scale_rounding": ("", "down"),
    "divisors": ([-1], [1] * 9, [], [1, 2]),
    "data": (0, 1, 3),
    "codes": (0,),
    "scales": (0,),
    "global_": (1, 6),
    "out": (0, 1, 7),
    "splits": (0, 1, 2),
    "offsets": (1, 4, 12),
    "amax": (1, 2),
    "found": (1, 7),
    "keys": (1, 2),
    "src_ptr": (0,),
    "dst_ptr": (0,),
    "amax_ptr": (0, 2),
    "bytes_ptr": (0,),
}  # fmt: skip
"""Argument -> values that are wrong in any call below."""


class BindingCall:
    """One call; `wrong`: whether an argument of it is."""

    def __init__(self, seed: int, extension: Any) -> None:
        self.rng, self.extension = random.Random(seed), extension
        self.name = self.rng.choice(NAMES)
        self.alive: list[Tensor] = []
        self.arguments: dict[str, Any] = getattr(self, f"_{self.name}")()
        known = [name for name in self.arguments if name in WRONG]
        self.wrong = bool(known) and self.rng.random() < 0.5
        if self.wrong:
            name = self.rng.choice(known)
            self.arguments[name] = self.rng.choice(WRONG[name])

    def run(self) -> None:
        getattr(self.extension, self.name)(**self.arguments)

    def __repr__(self) -> str:
        return f"{self.name}({self.arguments})"

    def address(self, *shape: int, dtype: torch.dtype = torch.float32) -> int:
        """The address of an array, which stays."""
        self.alive.append(torch.ones(*shape, dtype=dtype))
        return self.alive[-1].data_ptr()

    def codes(self, *shape: int) -> int:
        return self.address(*shape, dtype=torch.uint8)

    def spec(self) -> tuple[dict[str, Any], Any]:
        fields = self.rng.choice(SPECS)
        return fields, self.extension.Spec(**fields)

    def group(self, rows: int) -> dict[str, int]:
        """Offsets of one or two members, or none."""
        if self.rng.random() < 0.5:
            return {}
        inner = [16 * self.rng.randint(0, rows // 16)] * self.rng.randint(0, 1)
        self.alive.append(torch.tensor([0, *inner, rows]))
        return {"offsets": self.alive[-1].data_ptr(), "members": len(inner) + 1}

    def direction(self, spec: Any, rows: int, cols: int, *, find: bool) -> Any:
        places = {} if find else {"codes": self.codes(rows * cols), "scales": self.address(rows * cols)}
        return self.extension.Direction(spec, found=self.address(rows + cols), **places)

    def _quantize_cpu(self, find: bool = False) -> dict[str, Any]:
        rows, cols = 16 * self.rng.randint(1, 9), 16 * self.rng.randint(1, 9)
        fields, spec = self.spec()
        if find:
            while fields["family"] in ("mx", "block"):
                fields, spec = self.spec()
        sides = [self.direction(spec, rows, cols, find=find) for _ in range(2)]
        chosen = self.rng.choice((sides, [sides[0], None], [None, sides[1]]))
        data = {"data": self.address(rows, cols), "dtype": 0, "rows": rows, "cols": cols}
        call = {"row": chosen[0], "column": chosen[1], "dequantized": chosen[0] is not None and self.rng.random() < 0.5}
        isa = self.rng.choice(("", *self.extension.build_info()["isas"].split()[:1]))
        threads = {"threads": self.rng.randint(1, 3), "isa": isa}
        return {**data, "row_stride": cols, "col_stride": 1, **call, **threads, **self.group(rows)}

    def _find_amax_cpu(self) -> dict[str, Any]:
        return self._quantize_cpu(find=True)

    def _dequantize_cpu(self) -> dict[str, Any]:
        rows, cols = 16 * self.rng.randint(1, 9), 16 * self.rng.randint(1, 9)
        fields, spec = self.spec()
        call = {"spec": spec, "rows": rows, "cols": cols, "codes": self.codes(rows * cols)}
        call |= {"scales": self.address(rows * cols), "global_": self.address(4), "exact": False}
        if fields["family"] != "nvfp4":
            call["global_"] = self.rng.choice((0, call["global_"]))
        group = self.group(rows)
        columns = {"columns": self.rng.random() < 0.5} if group else {}
        return {**call, "out": self.address(rows, cols), "out_dtype": 0, "threads": 2, **columns, **group}

    def _offsets_cpu(self) -> dict[str, Any]:
        count = self.rng.randint(1, 9)
        splits = self.address(count, dtype=torch.int64)
        out = self.address(4 * (count + 1), dtype=torch.int64)
        rules = {"divisors": [0, 1, 128], "strides": [1, 3, 5]}
        return {"splits": splits, "wide": True, "count": count, **rules, "out": out}

    def _Spec(self) -> dict[str, Any]:
        return dict(self.rng.choice(SPECS)) | {"scale_rounding": "up"}

    def _Direction(self) -> dict[str, Any]:
        _, spec = self.spec()
        numbers = {"key0": 1, "key1": 2**32 - 1, "step": 2**63, "exact_dtype": 1}
        return {"spec": spec, **numbers, "amax": self.address(4), "found": self.address(4), "keys": self.address(4)}

    def _cast_elements(self) -> dict[str, Any]:
        return {"element": "e4m3", "src_ptr": self.address(32), "dst_ptr": self.codes(32), "n": 32}

    def _decode_elements(self) -> dict[str, Any]:
        return {"element": "e2m1", "src_ptr": self.codes(32), "dst_ptr": self.address(32), "n": 32}

    def _e8m0_up(self) -> dict[str, Any]:
        return {"src_ptr": self.address(32), "dst_ptr": self.codes(32), "n": 32}

    def _e8m0_scale(self) -> dict[str, Any]:
        return {"rounding": "even", "element": "e2m3", "amax_ptr": self.address(8), "dst_ptr": self.codes(8), "n": 8}

    def _stochastic_e2m1(self) -> dict[str, Any]:
        return {"src_ptr": self.address(8), "bytes_ptr": self.codes(8), "dst_ptr": self.codes(8), "n": 8}

    def _philox(self) -> dict[str, Any]:
        return {name: self.rng.randrange(2**32) for name in ("key0", "key1", "c0", "c1", "c2", "c3")}
