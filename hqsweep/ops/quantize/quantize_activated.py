"""Quantize an activation, or its gradient, from what it is computed of: on CUDA one pass, without the matrix between.

The bytes are those of quantize() of activation() or activation_backward(). The operator runs these two where no kernel
does both at once.
"""

from torch import Tensor

from hqsweep.ops.library import extension, operator, where
from hqsweep.ops.model.activation import INPUTS, activation, activation_backward, check_gradient, check_input
from hqsweep.ops.quantize.blocks import Directions, Formats, fake_outputs, formats_of
from hqsweep.ops.quantize.request import Request, check_shape


def shape_of(z: Tensor, dh: Tensor | None, kind: str) -> tuple[int, int]:
    """The shape of the matrix that is quantized."""
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
    """The outputs of hqsweep::quantize for h, or with dh for z's gradient; formats are those of ops.blocks. ValueError
    for other formats, and as activation() raises it."""
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
    """The outputs of the operator quantize for h = activation(z), or with dh for the gradient of z (see quantized_of).

    For formats that blocks.takes_formats(), and a z that activation() takes. UserError for a shape that a format cannot
    hold.
    """
    check_shape(request, shape_of(z, dh, kind))
    return _by_operator(z, dh, kind, *formats_of(request))
