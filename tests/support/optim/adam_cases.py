"""What optimizers are given in tests of this folder."""

import torch
from torch import nn

from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer

OPTIONS = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
KEY = RngKey(seed=0, slot="w", step=1)


def value(index=0):
    return draw("normal", 64, 96, index, torch.float32)


def quantized(text, **options):
    weight = HybridQuantizedTensor.quantize(value(), HybridQuantizer.parse(text), key=KEY, **options)
    return nn.Parameter(weight)


def mixed_parameters(device="cpu"):
    """A bf16 weight, an FP32 one, a quantized one, and one whose gradient is a main_grad."""
    parts = [value().bfloat16(), value(), quantized("mxfp8").detach(), value()]
    parameters = [nn.Parameter(part.to(device)) for part in parts]
    for index, p in enumerate(parameters[:-1]):
        p.grad = (0.1 * value(index + 1)).to(device, p.dtype)
    parameters[-1].main_grad = 0.1 * value(9).to(device)
    return parameters
