"""FusedSGD by TransformerEngine's arguments is torch.optim.SGD."""

import pytest
import torch
from torch import nn

from hqsweep import compat
from hqsweep.compat import FusedSGD
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw


@pytest.mark.parametrize("options", [
    {}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.5, "dampening": 0.3}
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchs(options, dtype):
    ours, theirs = (nn.Parameter(draw("normal", 16, 32).to(dtype)) for _ in range(2))
    optimizers = FusedSGD([ours], 0.1, **options), torch.optim.SGD([{"params": [theirs]}], 0.1, **options)
    for step in range(3):
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = draw("normal", 16, 32, step).to(dtype)
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_what_is_not_here_is_refused():
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(UserError, match="FusedSGD: wd_after_momentum=True has no counterpart here"):
        FusedSGD([weight], 0.1, wd_after_momentum=True)
    with pytest.raises(UserError, match="FusedSGD: lr is missing"):
        FusedSGD([weight])
    with compat.quantized_model_init(recipe="mxfp8"):
        held = compat.Linear(32, 64, bias=False).weight
    with pytest.raises(UserError, match="1 parameters are quantized, such as one in mxfp8; take FusedAdam"):
        FusedSGD([{"params": [held]}], 0.1)
