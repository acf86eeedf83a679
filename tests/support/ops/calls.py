"""quantize and find_amax with the options of each direction by name, as tests over both directions build them; and
splits whose sizes the host does not know."""

import torch
from hqsweep.ops.members.splits import Splits

from hqsweep.ops.quantize import amax
from hqsweep.ops.quantize import quantize as module
from hqsweep.ops.quantize.request import Target

DIRECTIONS = ("rowwise", "columnwise")


def device_splits(sizes, device) -> Splits:
    """Sizes that only the device knows."""
    return Splits(rows=sum(sizes), count=len(sizes), sizes=None, device_sizes=torch.tensor(sizes, device=device))


def quantize(x, rowwise=None, columnwise=None, *, by_rows=False, **options):
    """rowwise_output, columnwise_key, rowwise_grid and so on become fields of the Targets; the rest is passed on."""
    targets = []
    for direction, format in zip(DIRECTIONS, (rowwise, columnwise), strict=True):
        fields = {name: options.pop(f"{direction}_{name}", None) for name in ("key", "grid")}
        output = options.pop(f"{direction}_output", "codes")
        targets.append(Target(format, output, **fields, by_rows=by_rows and direction == "columnwise"))
    return module.quantize(x, *targets, **options)


def find_amax(x, rowwise=None, columnwise=None, **options):
    """out_rowwise, out_columnwise, rowwise_amax, rowwise_key and columnwise_key become fields of the Searches."""
    fields = [options.pop(name, None) for name in ("out_rowwise", "rowwise_amax", "rowwise_key")]
    column = amax.Search(columnwise, options.pop("out_columnwise", None), key=options.pop("columnwise_key", None))
    return amax.find_amax(x, amax.Search(rowwise, *fields), column, **options)
