"""ActivationOffload: the same bytes under the same strides, what would not be freed stays, nothing is left over."""

from contextlib import contextmanager

import pytest
import torch
from cases import BASE_LINEARS, REPRESENTATIVE, SOME, attended, crossed
from torch import nn
from torch.utils.checkpoint import checkpoint

from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, LinearOptions, TransformerLayer, quantization, quantized_model_init
from hqsweep.nn.dot_product_attention import TENSORS, DotProductAttention
from hqsweep.nn.saved_memory import ActivationOffload, SavedBytes, _Lane, saved_input_bytes
from hqsweep.quant import HybridQuantizer, flatten, unflatten
from hqsweep.recipe import DpaQuantizers, LinearQuantizers, Recipe

BYTES = {  # (quantizers, save_original_input) -> bytes an element of x [32, 64]
    ("mxfp8", False): 1 + 1 / 32,
    ("mxfp8", True): 2,
    ("nvfp4|mxfp8", True): 2,
    ("nvfp4|mxfp8@rowwise_dequantized", True): 1 + 1 / 32,  # vetoes
    ("mxfp8|nvfp4", False): 0.5 + 1 / 16 + 4 / (32 * 64),
    ("fp8_current", False): 1 + 4 / (32 * 64),
    ("bf16", False): 2,
}


@pytest.mark.feature("F41")
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("quantizers", "original"), BYTES, ids=str)
def test_bytes_per_element_saved_for_backward(quantizers, original, held):
    options = LinearOptions(save_original_input=original)
    with quantized_model_init(enabled=held):
        module = Linear(64, 96, name="layer", recipe=quantizers, bias=True, options=options)
    saved = SavedBytes(module)
    with saved.counting():
        module(draw("normal", 32, 64))
    assert saved.nbytes / (32 * 64) == BYTES[quantizers, original] == saved_input_bytes(module, 32)


def test_a_layer_keeps_less_in_lower_formats():
    nbytes = {}
    for linear in ("bf16", "mxfp8", "bf16|nvfp4"):
        layer = TransformerLayer(64, 128, 2, name="l", recipe=Recipe.from_config({"linear": linear}))
        saved = SavedBytes(layer)
        with saved.counting():
            layer(torch.randn(2, 32, 64))
        nbytes[linear] = saved.nbytes
    inputs = 2 * 32 * (3 * 64 + 128)  # elements of the inputs of the four linears
    assert nbytes["bf16"] - nbytes["mxfp8"] == inputs * (2 - 1 - 1 / 32)
    assert nbytes["bf16"] - nbytes["bf16|nvfp4"] == inputs * (2 - 0.5 - 1 / 16) - 4 * 4


pytestmark = pytest.mark.usefixtures("deterministic")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
KEY = RngKey(seed=1, slot="test", step=2)
OPERANDS = [text for text in REPRESENTATIVE if not (parse(text).row_scaled or parse(text).delayed)]
ROWWISE = [text.replace("+rht", "").replace("+eden", "") for text in (*OPERANDS[7:], *OPERANDS[:7])]


class Keep(torch.autograd.Function):
    """Saves tensors, and gives them back in backward."""

    @staticmethod
    def forward(ctx, x, tensors, received):
        ctx.save_for_backward(*tensors)
        ctx.received = received
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.received.append(ctx.saved_tensors)
        return dy, None, None


def offload(model=None, device="cpu", *, min_bytes=1, **options):
    return ActivationOffload(model or nn.Linear(1, 1, device=device), min_bytes=min_bytes, **options)


def there_and_back(tensors, device="cpu"):
    """What backward finds of saved tensors, which by then have left the device."""
    away, received = offload(device=device, window_bytes=0), []
    x = torch.zeros(1, device=device, requires_grad=True)
    with away.saving():
        y = Keep.apply(x, [*tensors, x + 1], received)
    assert away.host_bytes == sum(t.nbytes for t in tensors) + x.nbytes and len(away.leaving.held) == 1
    y.backward()
    assert away.host_bytes == 0
    return received[0][:-1]


def stack(text, device="cpu", *, held=False, layers=3, width=64):
    torch.manual_seed(0)
    with quantized_model_init(enabled=held), quantization(seed=5):
        quantizers = LinearQuantizers.parse(text, "test")
        linears = [Linear(width, width, name=f"layers.{i}", recipe=quantizers) for i in range(layers)]
    return nn.Sequential(*(part for linear in linears for part in (linear, nn.SiLU()))).to(device)


def gradients(model, x, away=None, call=lambda model, x: model(x)):
    x = x.clone().requires_grad_()
    model.zero_grad()
    with quantization(seed=1, step=5):
        if away is None:
            y = call(model, x)
        else:
            with away.saving():
                y = call(model, x)
        y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_comes_back(operands, device):
    """In one backward, each as it was."""
    parts = [flatten(operand) for operand in operands]
    back = iter(there_and_back([t for tensors, _ in parts for t in tensors], device))
    for operand, (tensors, skeleton) in zip(operands, parts, strict=True):
        received = [next(back) for _ in tensors]
        for a, b in zip(tensors, received, strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
            assert (a.stride(), a.dtype, a.device) == (b.stride(), b.dtype, b.device)
        assert torch.equal(unflatten(received, skeleton).operand().matrix, operand.operand().matrix)


def matrix(device):
    return torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)


@pytest.mark.feature("F122", "F160")
@devices
@pytest.mark.parametrize(
    ("formats", "source"),
    crossed(zip(ROWWISE, OPERANDS, strict=True), ["original", "rowwise_dequantized"], whole=()),
    ids=lambda value: value if isinstance(value, str) else "|".join(value),
)
def test_both_operands_come_back_to_the_byte(formats, source, device):
    """Each format in both directions, beside another one: buffers travel one by one, whatever they mean."""
    quantizer = HybridQuantizer.parse("|".join(formats) + f"@{source}")
    operands = quantizer.quantize(matrix(device), key=KEY)
    assert_comes_back([operands.rowwise, operands.columnwise], device)


@pytest.mark.feature("F122", "F160")
@devices
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("format", OPERANDS)
def test_one_direction_alone_comes_back(format, direction, device):
    row = format.replace("+rht", "").replace("+eden", "")
    operands = HybridQuantizer.parse(f"{row}|{format}").quantize(
        matrix(device), **dict.fromkeys(("rowwise", "columnwise")) | {direction: "codes"}, key=KEY
    )
    assert_comes_back([getattr(operands, direction)], device)


@devices
def test_strides_are_kept(device):
    x = torch.arange(24 * 32, device=device, dtype=torch.float32).view(4, 6, 32)
    views = [x, x.transpose(0, 2), x[:, 2:5, ::2], x.chunk(3, dim=1)[1].transpose(0, 1), x[0, 0, :1], x[1, 1, 1]]
    for sent, received in zip(views, there_and_back(views, device), strict=True):
        assert torch.equal(sent, received) and sent.stride() == received.stride()


def test_what_would_not_be_freed_stays():
    model = nn.Linear(64, 64)
    model.register_buffer("table", torch.zeros(64, 64))
    with quantized_model_init():
        quantizers = LinearQuantizers.parse("nvfp4|mxfp8", "test")
        model.held = Linear(64, 64, name="held", recipe=quantizers)
    big, small = torch.zeros(64, 64), torch.zeros(8)
    conjugated, code = torch.zeros(64, 64, dtype=torch.complex64).conj(), model.held.weight.columnwise.buffers["q"]
    stays = [model.weight, model.weight.detach()[:32], model.table, code, small, small.expand(4096, 8), conjugated]
    away = offload(model, min_bytes=1024)
    for tensor, goes in [*((tensor, False) for tensor in stays), (big, True)]:
        with away.saving():
            y = Keep.apply(torch.zeros(1, requires_grad=True), [tensor], [])
        assert away.host_bytes == (tensor.nbytes if goes else 0)
        del y


@pytest.mark.feature("F123", "F161")
@devices
@pytest.mark.parametrize(
    ("name", "held", "window_bytes"),
    crossed(BASE_LINEARS, [False, True], [0, 20_000, 2**30], whole=("nvfp4", "hybrid")),
)
def test_gradients_are_the_same_bytes(name, held, window_bytes, device):
    """With no window, one of some tensors, and one that takes all."""
    model, x = stack(BASE_LINEARS[name], device, held=held), torch.randn(32, 64, device=device)
    away = offload(model, window_bytes=window_bytes)
    expected = gradients(model, x)
    for _ in range(3):
        assert same(expected, gradients(model, x, away))


@devices
@pytest.mark.parametrize("text", attended(SOME, 64))
def test_attention_is_the_same_bytes(text, device):
    module = DotProductAttention(name="dpa", recipe=DpaQuantizers(**{t: HybridQuantizer.parse(text) for t in TENSORS}))
    model = nn.Linear(1, 1, device=device)
    qkv = [torch.randn(2, 64, 3, 32, device=device).bfloat16().transpose(1, 2) for _ in range(3)]
    runs = []
    for away in (None, offload(model, window_bytes=0)):
        inputs = torch.stack(qkv).requires_grad_()
        with quantization(seed=1), away.saving() if away else torch.enable_grad():
            o = module(*inputs)
        o.backward(torch.ones_like(o))
        runs.append([o.detach(), inputs.grad])
    assert same(*runs)


@devices
@pytest.mark.parametrize("reentrant", [True, False])
def test_inputs_of_what_is_computed_again_wait_too(reentrant, device):
    def call(model, x):
        for linear, activation in zip(model[::2], model[1::2], strict=True):
            x = checkpoint(lambda x, f=linear, g=activation: g(f(x)), x, use_reentrant=reentrant)
        waiting.append(away.host_bytes)
        return x

    model, x = stack(BASE_LINEARS["nvfp4"], device), torch.randn(32, 64, device=device)
    away, waiting = offload(model), []
    expected = gradients(model, x)
    assert same(expected, gradients(model, x, away, call))
    assert waiting[0] == sum(x.nbytes // (2 if i else 1) for i in range(3))  # float32, then bfloat16


@devices
def test_backward_may_run_twice_and_microbatches_may_overlap(device):
    model, x = stack("mxfp8", device), torch.randn(32, 64, device=device)
    away = offload(model, window_bytes=0)
    expected = gradients(model, x)[2:]
    model.zero_grad()
    with away.saving():
        first = model(x).float().square().sum()
    with away.saving():
        second = model(x).float().square().sum()
    for loss in (first, second):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert same(expected, [p.grad for p in model.parameters()])
    model.zero_grad()
    first.backward()
    assert same(expected, [p.grad for p in model.parameters()])


@pytest.mark.feature("F122", "F160", "F44")
@devices
def test_nothing_is_left_over(device):
    """After steps, a graph that is dropped, and a forward or backward that raises."""
    model, x = stack("mxfp8", device), torch.randn(32, 64, device=device)
    away = offload(model, window_bytes=20_000)
    for _ in range(3):
        gradients(model, x, away)
        assert away.host_bytes == away.leaving.nbytes == away.arriving.nbytes == 0
    with pytest.raises(ZeroDivisionError), away.saving():
        model(x)
        raise ZeroDivisionError
    with away.saving():
        y = model(x)
    model[2].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x.requires_grad_()).sum().backward()
    del y
    with away.saving():
        pass
    assert away.host_bytes == away.leaving.nbytes == away.arriving.nbytes == 0


def test_tensors_are_brought_back_ahead_in_reverse_order():
    sent = [torch.full((1000,), float(i)) for i in range(6)]
    away, seen = offload(window_bytes=2 * sent[0].nbytes), []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, tensor):
            ctx.save_for_backward(tensor)
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            (tensor,) = ctx.saved_tensors
            on_device = {*away.leaving.held, *away.arriving.held}
            seen.append((tensor[0].item(), sorted(saved.number for saved in on_device)))
            return dy, None

    y = torch.zeros(1, requires_grad=True)
    with away.saving():
        for tensor in sent:
            y = Look.apply(y, tensor)
    assert sorted(saved.number for saved in away.leaving.held) == [4, 5]
    y.backward()
    assert seen == [(5, [2, 3, 4]), (4, [2, 3]), (3, [1, 2]), (2, [0, 1]), (1, [0]), (0, [])]


def test_copies_wait_for_the_computing_stream_and_it_waits_for_them(monkeypatch):
    """The order in which the CUDA path enqueues, with streams that only take notes."""
    log = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def record_event(self):
            return f"event {len(log)} of {self.name}"

        def wait_event(self, event):
            log.append(f"{self.name} waits for {event}")

    @contextmanager
    def on(stream):
        log.append(f"on {stream.name}")
        yield
        log.append("on main")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    away = offload(window_bytes=0)
    away.leaving, away.arriving = (_Lane(torch.device("cuda"), 0) for _ in range(2))
    x = torch.zeros(1, requires_grad=True)
    with away.saving():
        y = Keep.apply(x, [torch.ones(2), torch.ones(3)], [])
    copy = ["side waits for main", "on side", "on main"]
    assert log == [*copy, *copy, "main waits for event 2 of side"]  # the first is dropped behind its copy
    log.clear()
    y.backward()
    assert log == [*copy, "main waits for event 2 of side", "main waits for event 5 of side"]


@pytest.mark.feature("F123", "F161")
@pytest.mark.gpu
def test_nothing_waits_on_the_host_and_host_memory_is_used_again():
    model, x = stack("mxfp8", "cuda", width=1024), torch.randn(4096, 1024, device="cuda")
    away, allocations = offload(model, window_bytes=2**20), []
    for step in range(6):
        torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
        try:
            gradients(model, x, away)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        allocations.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    assert allocations[0] > 0 and allocations[2:] == allocations[2:3] * 4


@pytest.mark.feature("F123", "F161")
@pytest.mark.gpu
def test_memory_falls():
    model, x = stack("mxfp8", "cuda", layers=16, width=1024), torch.randn(16384, 1024, device="cuda")
    peaks = {}
    for name, away in (("none", None), ("offload", offload(model, window_bytes=64 * 2**20))):
        gradients(model, x, away)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(model, x, away)
        peaks[name] = torch.cuda.max_memory_allocated() - before
    assert peaks["offload"] < 0.6 * peaks["none"], peaks
