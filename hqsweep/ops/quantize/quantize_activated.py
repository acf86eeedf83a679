"""Quantize an activation, or its gradient, in the pass that computes it: on CUDA the matrix is never stored.

The bytes equal quantize() of activation() or activation_backward(). Without a fused kernel, the operator runs these
two.
"""

from torch import Tensor

from hqsweep.ops.library import extension, operator, where
from hqsweep.ops.model.activation import INPUTS, activation, activation_backward, check_gradient, check_input
from hqsweep.ops.quantize.blocks import Directions, Formats, fake_outputs, formats_of
from hqsweep.ops.quantize.request import Request, check_shape


def shape_of(z: Tensor, dh: Tensor | None, kind: str) -> tuple[int, int]:
    """Return the shape of the quantized matrix."""
    return (z.shape[0], z.shape[1] // INPUTS[kind]) if dh is None else (z.shape[0], z.shape[1])


def _fake(z, dh, kind, *formats):
    return fake_outputs(z, shape_of(z, dh, kind), Formats(*formats))


@operator(
    "quantize_activated(Tensor z, Tensor? dh, str kind, str rowwise, str columnwise, bool dequantized, "
    "bool[2] exact, int seen=0) -> Tensor[]",
    fake=_fake,
    devices=("CUDA",),
)
def _by_operator(z, dh, kind, *formats):
    """Return the outputs of hqsweep::quantize for h, or with dh for the gradient of z. formats: the fields of
    blocks.Formats.

    ValueError for other formats, and as activation() raises it.
    """
    check_input(z, kind)
    if dh is not None:
        check_gradient(dh, z, kind)
    directions = Directions(z, shape_of(z, dh, kind), Formats(*formats))
    of = (kind, z.shape[0], z.shape[1] // INPUTS[kind], z.data_ptr(), 0 if dh is None else dh.data_ptr())
    if not extension().quantize_activated_cuda(*of, *directions.arguments, *where(z)):
        (x,) = activation(z, kind) if dh is None else activation_backward(dh, z, kind)
        directions.quantize(x)
    return directions.tensors


def quantize_activated(request: Request, z: Tensor, dh: Tensor | None, kind: str) -> list[Tensor]:
    """Return the quantize operator's outputs for h = activation(z), or with dh for the gradient of z (see
    quantized_of).

    It needs formats that blocks.takes_formats() accepts, and a z that activation() takes. UserError for a shape that a
    format cannot hold.
    """
    check_shape(request, shape_of(z, dh, kind))
    return _by_operator(z, dh, kind, *formats_of(request))
