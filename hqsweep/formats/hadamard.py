"""The 16-point random Hadamard transform of NVFP4's columnwise operands.

y = v * diag(d) * H16 / 4 over consecutive groups of 16 along the contracted axis, accumulated in float32; NVFP4
rounds the result to bfloat16. Both operands of wgrad carry the same d, so the transform cancels: (dY' R)(R' X) = dY'
X. The sums run as a butterfly with strides 1, 2, 4, 8, in that order, on CPU and CUDA; TransformerEngine's
tensor-core order is not documented and agrees wherever the float32 sum is exact. Source of d:
pytorch/tensor/nvfp4_tensor.py at d0067d0da6cb.
"""

import torch
from torch import Tensor

GROUP = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard(x: Tensor, *, signed: bool = True) -> Tensor:
    """[rows, cols] with cols a multiple of 16 -> float32 of that shape, not yet rounded; signed=False takes d = 1."""
    groups = x.float().reshape(-1, GROUP) * 0.25
    if signed:
        groups = groups * torch.tensor(SIGNS, dtype=torch.float32, device=x.device)
    for stride in (1, 2, 4, 8):
        pairs = groups.view(-1, GROUP // (2 * stride), 2, stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        groups = torch.stack((a + b, a - b), dim=2).view(-1, GROUP)
    return groups.view(x.shape)
