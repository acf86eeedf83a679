"""Keys and amaxes that the quantize operator takes beside X, from the targets of both directions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.formats import Buffers, RngKey, RngKeys
from hqsweep.ops.addresses import key_table
from hqsweep.ops.quantize.kernels import NO_KEY, KernelSpec
from hqsweep.ops.quantize.request import Request, Target, key_words


class Inputs(NamedTuple):
    """Keys and amaxes of one matrix, or of all members, for the operator."""

    row_key: list[int]
    column_key: list[int]
    row_amax: Tensor | None
    column_amax: Tensor | None
    row_keys: Tensor | None = None
    column_keys: Tensor | None = None
    step: Tensor | None = None
    """The tensor that holds the step for all keys, in place of the keys' own step."""


NO_INPUTS = Inputs(NO_KEY, NO_KEY, None, None)


def matrix_inputs(request: Request, row: Target, column: Target) -> Inputs:
    """Return the inputs of one matrix."""
    row_key, column_key, step = NO_KEY, NO_KEY, None
    if request.stochastic:
        row_key, column_key = key_words(request.row, row.key), key_words(request.column, column.key)
        step = _counter_of([key for key in (row.key, column.key) if key is not None])
    elif row.grid is None and column.grid is None:
        return NO_INPUTS
    row_amax = None if row.grid is None or request.row is None else row.grid[request.row.amax_name]
    column_amax = None if column.grid is None or request.column is None else column.grid[request.column.amax_name]
    return Inputs(row_key, column_key, row_amax, column_amax, step=step)


def _counter_of(keys: Sequence[RngKey | RngKeys]) -> Tensor | None:
    """Return the counter that all keys share. ValueError if they have several."""
    counter = keys[0].counter
    if any(key.counter is not counter for key in keys):
        raise ValueError("the keys of one call have several counters; give all the same one, or none")
    return counter


def of_member(target: Target, member: int) -> Target:
    """Return the target of a single member."""
    key, grid = (values and values[member] for values in (target.key, target.grid))
    return target._replace(key=key, grid=grid)


def member_inputs(request: Request, row: Target, column: Target, device: torch.device) -> Inputs | None:
    """Return the inputs of all members, or None if each member needs a call of its own.

    That is so for inputs that one kernel call does not take, and for inputs that a member's own call refuses.
    """
    if not (request.stochastic or request.delayed or row.grid is not None or column.grid is not None):
        return NO_INPUTS
    step, counters, tables, amaxes = None, [], [], []
    for spec, target in ((request.row, row), (request.column, column)):
        try:
            amaxes.append(_amaxes(spec, target.grid))
        except LookupError:
            return None
        if spec is None or not spec.stochastic:
            tables.append(None)
            continue
        keys = target.key
        if keys is None or (not isinstance(keys, RngKeys) and None in keys):
            return None
        # Compared, never hashed: torch.compile would make a graph for each number of a step.
        steps = [keys.step] if isinstance(keys, RngKeys) else [key.step for key in keys]
        step = steps[0] if step is None else step
        if any(other != step for other in steps):
            return None
        counters += [keys] if isinstance(keys, RngKeys) else keys
        tables.append(key_table(keys, device))
    key = [0, 0, step or 0]
    return Inputs(key, key, *amaxes, *tables, _counter_of(counters) if counters else None)


def _amaxes(spec: KernelSpec | None, grids: Sequence[Buffers | None] | None) -> Tensor | None:
    """Return the given global amaxes of all members, concatenated. LookupError for grids that the kernel refuses."""
    if spec is None or grids is None or all(grid is None for grid in grids):
        if spec is not None and spec.delayed:
            raise LookupError
        return None
    if any(grid is None or set(grid) != {spec.amax_name} for grid in grids):
        raise LookupError
    return torch.cat([grid[spec.amax_name].reshape(-1) for grid in grids])
