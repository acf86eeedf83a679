"""TransformerEngine's layers over ranks by their names, beside the styles of this package, and one process."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hqsweep import compat
from hqsweep.compat import CustomRecipe, autocast, current_scaling_factory, high_precision_factory, nvfp4_factory
from hqsweep.formats.inputs import draw
from hqsweep.nn import quantized_model_init
from hqsweep.parallel.tensor import tensor_parallel
from hqsweep.quant import HybridQuantizedTensor

D, F, H, S = 128, 128, 4, 64
BF16 = {"params_dtype": torch.bfloat16}
LAYER = {"hidden_dropout": 0, "attention_dropout": 0, "activation": "swiglu", "name": "m", **BF16}
ATTENTION = {"attention_dropout": 0, "input_layernorm": True, "name": "m", **BF16}
LAYERS = {
    "TransformerLayer": (partial(compat.TransformerLayer, D, F, H, **LAYER), {"attn_input_format": "bshd"}),
    "MultiheadAttention": (partial(compat.MultiheadAttention, D, H, **ATTENTION), {"qkv_format": "bshd"}),
    "LayerNormMLP": (partial(compat.LayerNormMLP, D, F, name="m", **BF16), {}),
}
"""How each is built, and by what it takes x [1, S, D], as the styles do, and not [S, 1, D]."""
HIGH = CustomRecipe(qfactory=high_precision_factory)
LOW = CustomRecipe(
    qfactory=lambda role: (current_scaling_factory if role and role.module_type == "dpa" else nvfp4_factory)(role),
    fp8_dpa=True,
)
CUTS = {"column": 0, "row": 1}
"""How ranks share a weight [N, K] -> the axis of it that is cut."""
WEIGHTS = ("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight")


def differences(rank: int, world: int) -> list[str]:
    """What of each layer is not, to the byte, that of the styles, whose operands are those of one process, or in high
    precision differs from one process by more than the order of sums explains; without and with tokens that lie split,
    with a group that is given at once, or later."""
    mesh, faults = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), []
    group = mesh.get_group()
    for name, (build, as_styles) in LAYERS.items():
        for sequence in (False, True):
            shared = {"tp_size": world, "set_parallel_mode": True, "sequence_parallel": sequence}
            styled = tensor_parallel(seeded(build, **as_styles), mesh, sequence=sequence)
            own = seeded(build, tp_group=group, **shared)
            tokens = partial(part, rank=rank, ranks=world if sequence else 1)
            expected = run(styled, LOW, (1, -1, D), tokens)
            with quantized_model_init(recipe=LOW):
                held, held_alone = seeded(build, tp_group=group, **shared), seeded(build)
            for module in (own, held):
                actual = run(module, LOW, (-1, 1, D), tokens)
                faults += [f"{name} {sequence}: {n}" for n, t in expected.items() if not torch.equal(t, actual[n])]
            faults += [f"{name} {sequence}: {n}" for n in parts_that_differ(held, held_alone, rank, world)]
            alone = seeded(build)
            whole = run(alone, HIGH, (-1, 1, D), partial(part, rank=0, ranks=1))
            actual = run(own, HIGH, (-1, 1, D), tokens)
            faults += [f"{name} {sequence}: {n}" for n in gains_that_differ(own, alone, group, sequence)]
            for n in ("y", "dx"):
                error = (actual[n].float() - tokens(whole[n]).float()).norm() / tokens(whole[n]).float().norm()
                faults += [f"{name} {sequence}: {n} is off by {error}"] if error > 1e-2 else []
    build = LAYERS["MultiheadAttention"][0]
    at_once = seeded(build, tp_group=group, tp_size=world, set_parallel_mode=True)
    later = seeded(build, tp_size=world, set_parallel_mode=True)
    later.set_tensor_parallel_group(group)
    later.load_state_dict(at_once.state_dict())
    x = draw("normal", S, D, 3).view(S, 1, D)
    return faults + ([] if torch.equal(later(x), at_once(x)) else ["a group that comes later"])


def parts_that_differ(shared: nn.Module, alone: nn.Module, rank: int, world: int) -> list[str]:
    """Names of held weights, and of their buffers, that do not have the bytes of the rank's part of one process."""
    faults = []
    for module_name, module in shared.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(weight, HybridQuantizedTensor):
                whole, cut = alone.get_submodule(module_name).get_parameter(name), CUTS[module._mode]
                pieces = getattr(module, "pieces", 1)
                faults += [f"{module_name}.{n}" for n in buffers_that_differ(weight, whole, cut, (pieces, rank, world))]
    return faults or ([] if len(held_weights(shared)) else ["nothing is held"])


def held_weights(module: nn.Module) -> list[HybridQuantizedTensor]:
    return [p for p in module.parameters() if isinstance(p, HybridQuantizedTensor)]


def buffers_that_differ(part, whole, axis: int, place: tuple[int, int, int]) -> list[str]:
    """Names of buffers of a matrix, or of experts' matrices, that are not those of the part of the whole."""
    pieces, rank, world = place
    if part.dim() == 3:
        pairs = zip(part.unbind(), whole.unbind(), strict=True)
        return [name for pair in pairs for name in buffers_that_differ(*pair, axis, place)]
    faults = []
    for name, own in part.buffers.items():
        along, expected = 1 - axis if name.startswith("columnwise") else axis, whole.buffers[name]
        if own.shape != expected.shape:
            expected = expected.unflatten(along, (pieces, world, -1)).select(along + 1, rank).flatten(along, along + 1)
        faults += [] if torch.equal(own, expected) else [name]
    return faults


def gains_that_differ(shared: nn.Module, alone: nn.Module, group: dist.ProcessGroup, sequence: bool) -> list[str]:
    """Names of gains of norms that do not say whose tokens their gradients are of, or whose gradients, summed over the
    ranks where these have some of the tokens each, are not near those of one process."""
    faults, whole = [], dict(alone.named_parameters())
    for name, gain in shared.named_parameters():
        if "norm" in name:
            total = gain.grad.float()
            if sequence:
                dist.all_reduce(total, group=group)
            error = (total - whole[name].grad).norm() / whole[name].grad.norm()
            faults += [f"{name}: {error}"] if gain.sequence_parallel is not sequence or not error <= 1e-2 else []
    return faults or ([] if any("norm" in name for name in whole) else ["no gain"])


def seeded(build, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return build(**options)


def part(x: Tensor, rank: int, ranks: int) -> Tensor:
    return x.chunk(ranks)[rank % ranks]


def run(module: nn.Module, recipe: CustomRecipe, shape: tuple[int, ...], tokens) -> dict[str, Tensor]:
    """y, the gradient of x, and those of this rank's parts of weights, of one sequence or this rank's tokens of it."""
    module.zero_grad()
    x, dy = (tokens(draw("normal", S, D, seed)) for seed in (3, 4))
    x = x.clone().requires_grad_()
    with autocast(recipe=recipe):
        y = module(x.view(shape))
    y.backward(dy.view(shape).to(y.dtype))
    gradients = {name: p.grad for name, p in module.named_parameters() if name.endswith(WEIGHTS)}
    own = {name: g.to_local() if hasattr(g, "to_local") else g for name, g in gradients.items()}
    return {"y": y.detach().view(-1, D), "dx": x.grad} | own
