"""What ranks send, and hold, while a model of held weights trains under fully_shard."""

import torch
from support.parallel.fsdp2_training import accumulate, shard, trained
from support.ranks import rank_device
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from hqsweep import convert
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, quantization, quantized_model_init
from hqsweep.recipe import LinearQuantizers

SIZE = 256


class Counting:
    """torch's own all-gather, and the bytes that every rank's parts of each have together."""

    def __init__(self, inner):
        self.inner, self.sent = inner, []

    def allocate(self, *args, **options):
        return self.inner.allocate(*args, **options)

    def __call__(self, output_tensor, input_tensor, *args, **options):
        self.sent.append(output_tensor.nbytes)
        return self.inner(output_tensor, input_tensor, *args, **options)


class Stack(nn.Module):
    """Linears, one behind the other, ours or converted ones; recompute: each is run again in backward."""

    def __init__(self, text, recompute=False, converted=False):
        super().__init__()
        quantizers = LinearQuantizers.parse(text, "test")
        if converted:
            self.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16) for i in range(2))
            convert(self.blocks, quantizers)
        else:
            self.blocks = nn.ModuleList(Linear(SIZE, SIZE, name=f"l{i}", recipe=quantizers) for i in range(2))
        self.head = nn.Linear(SIZE, 2, bias=False, dtype=torch.bfloat16)
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def stack(text, **options):
    torch.manual_seed(0)
    with quantized_model_init(), quantization(seed=0, step=0):
        return Stack(text, **options).to(rank_device())


def counted(model):
    """The counters of the blocks, in whose place torch's all-gathers are."""
    counters = []
    for block in model.blocks:
        assert isinstance(block, FSDPModule)
        groups = _groups(block)
        counters.append(Counting(groups[0]._all_gather_comm))
        block.set_custom_all_gather(counters[-1])
    return counters


def run(model, step=1):
    with quantization(seed=0, step=step):
        x = draw("normal", 32, model.head.in_features, step).to(rank_device()).requires_grad_()
        model(x).float().square().mean().backward()


def sent(rank, texts):
    """Text -> case -> bytes an element of each gather of the first block, two steps."""
    return {text: _sent(text) for text in texts}


def _sent(text):
    cases = {}
    for name, options, raf, call in (
        ("reshards", {}, True, run),
        ("keeps", {}, False, run),
        ("recomputes", {"recompute": True}, True, run),
        ("evaluates", {}, True, evaluate),
        ("accumulates", {}, True, accumulate_),
        ("converted", {"converted": True}, True, run),
    ):
        model = shard(stack(text, **options), raf=raf)
        counters = counted(model)
        for _ in range(2):
            call(model)
        cases[name] = [round(nbytes / SIZE**2, 4) for nbytes in counters[0].sent]
    return cases


def sent_over_two(text):
    """Bytes an element of each gather of the first block, whose weight lies over two of four ranks between forward and
    backward: of a step, an evaluation and a step."""
    model = shard(stack(text), raf=2)
    counters = counted(model)
    for call in (run, evaluate, run):
        call(model)
    return [round(nbytes / SIZE**2, 4) for nbytes in counters[0].sent]


def trained_on_four(rank, text, held_names, names):
    """(faults of held weights, of plain ones, bytes an element of what is gathered where held ones lie over two ranks
    between forward and backward)."""
    held = trained(rank, [text], held_names)
    return held, trained(rank, [text], names, held=False), sent_over_two(text)


def plain(rank, texts):
    """Text -> case -> bytes an element of each gather of the first block, two steps, and what of its weight is there
    behind the forward of the last one and after it."""
    return {text: _plain(text) for text in texts}


def _plain(text):
    cases = {}
    for name, options, raf, call in (
        ("reshards", {}, True, run),
        ("keeps", {}, False, run),
        ("recomputes", {"recompute": True}, True, run),
        ("evaluates", {}, True, evaluate),
    ):
        torch.manual_seed(0)
        model = shard(Stack(text, **options).to(rank_device()), raf=raf)
        counters, left = counted(model), []
        model.blocks[0].register_forward_hook(lambda *_, block=model.blocks[0], left=left: left.append(_left(block)))
        for _ in range(2):
            call(model)
        cases[name] = [nbytes / SIZE**2 for nbytes in counters[0].sent], [left[-1], _left(model.blocks[0])]
    return cases


def _left(block):
    parameter = _groups(block)[0].fsdp_params[0]
    tensors = [*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors) / SIZE**2


def evaluate(model):
    with torch.no_grad(), quantization(seed=0, step=1):
        model(draw("normal", 32, SIZE, 1).to(rank_device()))


def accumulate_(model):
    accumulate(model, False)
    run(model)
    accumulate(model, True)
    run(model)


def memory(rank, text):
    """Bytes an element of the whole weights of both blocks that are there in the second one's forward, in its backward,
    and after a step, of three steps."""
    model, taken = shard(stack(text)), []

    def note(*_):
        taken.append([round(_held(block) / SIZE**2, 4) for block in model.blocks])

    model.blocks[1].register_forward_pre_hook(note)
    model.blocks[1].register_forward_hook(lambda module, x, y: y.register_hook(note) and None)
    for step in range(1, 4):
        run(model, step)
        note()
    return taken


def _groups(block):
    """The groups of parameters that torch gathers together, of which torch 2.11 has one."""
    state = block._get_fsdp_state()
    return getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]


def _held(block):
    """Bytes of the whole weight that are there: all that torch has gathered, and all that was made of it."""
    parameter = _groups(block)[0].fsdp_params[0]
    if not hasattr(parameter, "_unsharded_param"):
        return 0
    tensors = [*parameter._unsharded_param.buffers.values(), *parameter.all_gather_outputs]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
