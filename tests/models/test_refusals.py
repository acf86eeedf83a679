"""What convert refuses, what it leaves, with reasons, and what it takes of a model's multiplications."""

import pytest
import torch
from support.models.tiny import tiny
from torch import nn
from torch.nn.utils import parametrizations

import hqsweep
from hqsweep.errors import UserError
from hqsweep.models.kinds import experts_per_row, multiply_adds
from hqsweep.models.linear import ConvertedLinear
from hqsweep.nn import Linear
from hqsweep.nn.core.module import quantized_modules, set_recipe
from hqsweep.recipe.sectioned import Recipe


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x).topk(1)


class Plain(nn.Linear):
    """A subclass that computes as its base."""


def skipped(model, recipe="mxfp8", **options):
    return {s.name: s.why for s in hqsweep.convert(model, recipe, **options).skipped}


@pytest.mark.feature("H39")
def test_reasons_of_what_is_left_alone():
    model = nn.ModuleDict(
        {
            "taken": nn.Linear(64, 64),
            "router": Router(64, 64),
            "attention": nn.MultiheadAttention(64, 2),
            "wide": nn.Linear(64, 64, dtype=torch.float64),
            "narrow": nn.Linear(64, 4),
            "replaced": nn.Linear(64, 64),
            "encoder": nn.TransformerEncoderLayer(64, 2, 96),
            "lora_A": nn.ModuleDict({"default": nn.Linear(64, 64)}),
            "lazy": nn.LazyLinear(64),
        }
    )
    model["replaced"].forward = lambda x: x
    reasons = skipped(model)
    for name, word in {
        "router": "Router has a forward of its own",
        "attention.out_proj": "reads its weight and never calls it",
        "wide": "its weight is torch.float64",
        "narrow": "fewer than 16 features",
        "replaced": "its forward was replaced in the instance",
        "encoder.linear1": "set_fastpath_enabled",
        "encoder.self_attn.out_proj": "never calls it",
        "lora_A.default": "an adapter",
        "lazy": "LazyLinear has a forward of its own" if "forward" in vars(nn.LazyLinear) else "its shape",
    }.items():
        assert word in reasons.pop(name), name
    for name in ("attention", "encoder.self_attn"):
        assert reasons.pop(name) == "convert has no products of nn.MultiheadAttention"
    assert list(reasons) == ["encoder.linear2"] and len(quantized_modules(model)) == 1


def test_a_filter_takes_what_is_left_alone_by_default():
    model = nn.ModuleDict({"lora_A": nn.Linear(64, 4), "narrow": nn.Linear(64, 8), "router": Router(64, 64)})
    conversion = hqsweep.convert(model, "mxfp8", lambda module, name: True)
    assert [m.name for m in conversion.modules] == ["lora_A", "narrow"] and conversion.skipped[0].name == "router"


def test_layers_of_an_encoder_are_taken_without_the_path_around_them():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 96), 1, enable_nested_tensor=False)
        conversion = hqsweep.convert(model, "nvfp4")
        assert len(conversion.modules) == 2
        with torch.no_grad():
            model.eval()(torch.ones(16, 1, 64))
        assert not conversion.unused()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_a_subclass_keeps_its_class_and_can_be_parametrized():
    model = nn.Sequential(Plain(64, 64), parametrizations.weight_norm(nn.Linear(64, 64)))
    classes = [type(module) for module in model]
    hqsweep.convert(model, "mxfp8")
    assert all(isinstance(m, (ConvertedLinear, c)) for m, c in zip(model, classes, strict=True))
    x = torch.randn(32, 64)
    low = model(x)
    low.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert hqsweep.revert(model) == 2 and [type(module) for module in model] == classes
    assert not torch.equal(model(x), low)


def test_a_class_made_of_the_converted_one_is_not_reverted():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    hqsweep.convert(model, "mxfp8")
    parametrizations.weight_norm(model[1])
    with pytest.raises(UserError, match=r"^1: ParametrizedConvertedLinear was made of the converted class afterwards"):
        hqsweep.revert(model)
    assert len(quantized_modules(model)) == 2 and type(model[0]) is ConvertedLinear


@pytest.mark.feature("H39")
@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            lambda: nn.Sequential(nn.Conv1d(2, 2, 1)),
            {},
            r"nothing of Sequential is taken: .* that can be \(linear, conv1d, attention, experts\), but Conv1d",
        ),
        (
            lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))),
            {"filter_fn": lambda module, name: False},
            r"nothing of Sequential is taken: 0: filter_fn said no; 1: .*; 2: filter_fn said no, and 1 more",
        ),
        (
            lambda: nn.Sequential(nn.Linear(64, 60), nn.Linear(60, 64)),
            {"recipe": "nvfp4"},
            r"0 dgrad: the contracted axis has 60 elements.* takes a multiple of 16",
        ),
        (
            lambda: nn.Sequential(nn.Linear(64, 64)),
            {"recipe": {"linear": "mxfp8", "overrides": [{"name": "1", "linear": "bf16"}]}},
            r"overrides\[0\] .* matches no module",
        ),
        (lambda: nn.Sequential(nn.Linear(64, 64)), {"recipe": "mxfp9"}, "mxfp9"),
        (lambda: nn.Sequential(nn.Linear(64, 64)), {"recipe": "nvfp4+rht|mxfp8"}, "rht"),
    ],
)
def test_a_model_that_cannot_be_converted_stays_as_it_was(model, options, message):
    model = model()
    attributes = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    with pytest.raises(UserError, match=message):
        hqsweep.convert(model, **({"recipe": "mxfp8"} | options))
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == attributes


def test_rows_that_a_format_cannot_take_are_named_at_the_call():
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(64, 64))
    hqsweep.convert(model, "nvfp4")
    with pytest.raises(UserError, match=r"^fc: input: .*takes a multiple of 16 rows.*\(30, 64\)"):
        model(torch.ones(30, 64)).sum().backward()


def test_a_model_that_is_quantized_by_others_is_refused():
    model = nn.Sequential(nn.Linear(64, 64))
    model.is_quantized = True
    with pytest.raises(UserError, match=r"Sequential is quantized by another library .*quantization_config"):
        hqsweep.convert(model, "mxfp8")


def test_a_sharded_model_is_refused(tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard

    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        fully_shard(model[0], mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(UserError, match=r"0 is sharded by FSDP.*convert first"):
            hqsweep.convert(model, "mxfp8")
        whole = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        hqsweep.convert(whole, "mxfp8")
        fully_shard(whole, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        whole(torch.randn(32, 64)).sum().backward()
        assert whole[0].weight.grad is not None
        parallel = nn.Sequential(nn.Linear(64, 64))
        hqsweep.convert(parallel, "mxfp8")
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        torch.distributed.tensor.parallel.parallelize_module(
            parallel, mesh, {"0": torch.distributed.tensor.parallel.ColwiseParallel()}
        )
        with pytest.raises(UserError, match=r"^0: its weight is a DTensor; tensor parallelism is not supported"):
            parallel(torch.randn(32, 64))
    finally:
        destroy_process_group()


class Params4bit(nn.Parameter):
    """Codes in a subclass of Parameter, as bitsandbytes has them."""


def test_weights_of_other_libraries_are_no_plain_tensors():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].weight = Params4bit(torch.zeros(2048, 1, dtype=torch.uint8), requires_grad=False)
    assert skipped(model) == {"0": "its weight is a Params4bit, no plain tensor"}
    model[2].weight.ds_id = 3
    with pytest.raises(UserError, match=r"^convert: 2\.weight is sharded by DeepSpeed's ZeRO-3"):
        hqsweep.convert(model, "mxfp8")


def test_ways_to_call_it_wrongly():
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(UserError, match="Sequential was not converted"):
        hqsweep.conversion_of(model)
    with pytest.raises(UserError, match="filter_fn is 'lm_head'; it takes a function"):
        hqsweep.convert(model, "mxfp8", "lm_head")
    with pytest.raises(UserError, match=r"the model is a list; it takes an nn\.Module"):
        hqsweep.convert([model], "mxfp8")
    hqsweep.convert(model, "mxfp8")
    with pytest.raises(UserError, match="converted already"), hqsweep.converted(model, "nvfp4"):
        pass


OVERRIDDEN = {"linear": "mxfp8", "overrides": [{"name": "*", "linear": "bf16"}]}


class Matrices(nn.Module):
    """Parameters of its own: a matrix, a stack, and vectors of other shapes."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(32, 16))
        self.token, self.gain = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.zeros(32))


LEFT = {
    nn.LSTM: (nn.LSTM(32, 16, 2), 4 * 16 * (32 + 16) + 4 * 16 * (16 + 16)),
    nn.GRU: (nn.GRU(32, 16, bidirectional=True), 2 * 3 * 16 * (32 + 16)),
    nn.RNN: (nn.RNN(32, 16), 16 * (32 + 16)),
    nn.LSTMCell: (nn.LSTMCell(32, 16), 4 * 16 * (32 + 16)),
    nn.GRUCell: (nn.GRUCell(32, 16), 3 * 16 * (32 + 16)),
    nn.Conv1d: (nn.Conv1d(8, 16, 3), 8 * 16 * 3),
    nn.Conv2d: (nn.Conv2d(8, 16, 3, groups=2), 4 * 16 * 9),
    nn.Conv3d: (nn.Conv3d(8, 16, 1), 8 * 16),
    nn.ConvTranspose2d: (nn.ConvTranspose2d(8, 16, 2), 8 * 16 * 4),
    nn.Bilinear: (nn.Bilinear(8, 8, 16), 8 * 8 * 16),
    nn.MultiheadAttention: (nn.MultiheadAttention(32, 2), 3 * 32 * 32),
    Matrices: (Matrices(), 32 * 16),
    Linear: (Linear(64, 64, name="own", recipe="mxfp8"), 64 * 64),
}


@pytest.mark.parametrize(("module", "count"), LEFT.values(), ids=[kind.__name__ for kind in LEFT])
def test_what_multiplies_and_is_not_taken_is_skipped_with_its_share(module, count):
    assert multiply_adds(module) == count
    conversion = hqsweep.convert(nn.ModuleDict({"own": module, "linear": nn.Linear(64, 64)}), "mxfp8")
    skipped = {each.name: each for each in conversion.skipped}
    why = {
        Matrices: "what Matrices computes of parameters of its own is not known: w (32, 16)",
        Linear: "it computes by a recipe of its own, which set_recipe changes",
    }.get(type(module), f"convert has no products of nn.{type(module).__name__}")
    assert skipped["own"].why == why and skipped["own"].multiply_adds == count
    others = sum(each.multiply_adds for each in conversion.skipped)
    assert conversion.share == conversion.quantized_share == 4096 / (4096 + others)
    assert why in str(conversion) and repr(conversion) == f"<Conversion: {conversion}>"


def test_what_looks_up_or_scales_is_neither_counted_nor_skipped():
    plain = (nn.Embedding(32, 32), nn.EmbeddingBag(32, 32), nn.LayerNorm((4, 32)), nn.BatchNorm2d(8), nn.PReLU(4))
    model = nn.Sequential(*plain, nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))
    conversion = hqsweep.convert(model, "mxfp8")
    assert conversion.skipped == [] and conversion.share == 1


def test_nothing_that_is_quantized_is_said_and_so_is_a_part():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    conversion = hqsweep.convert(model, OVERRIDDEN)
    whole = "converted 2 linear, 100 % of the model's multiplications by weights"
    assert str(conversion) == f"{whole}; nothing is quantized" and conversion.quantized_share == 0
    assert "nothing is quantized" in repr(conversion) and "nothing is quantized" in conversion._repr_html_()
    set_recipe(model, Recipe.from_config({"linear": "mxfp8", "overrides": [{"name": "0", "linear": "bf16"}]}))
    assert str(conversion) == f"{whole} (50 % are quantized)" and conversion.quantized_share == 0.5
    set_recipe(model, Recipe.from_config({"linear": "mxfp8"}))
    assert str(conversion) == whole


def test_a_share_is_100_or_0_only_where_it_is_all_or_nothing():
    model = nn.ModuleDict({"large": nn.Linear(4096, 4096), "small": nn.Conv1d(2, 2, 1)})
    assert ", 99.9 % of the model's" in str(hqsweep.convert(model, "mxfp8"))


def test_of_experts_those_count_that_a_row_takes():
    model = tiny("mixtral")
    conversion = hqsweep.convert(model, "mxfp8")
    experts, chosen = model.config.num_local_experts, experts_per_row(model)
    stacks = [part for part in conversion.parts if part.kind == "experts"]
    assert chosen == model.config.num_experts_per_tok < experts
    assert [part.multiply_adds for part in stacks] == [chosen * part.shape[0] * part.shape[1] for part in stacks]
    left = hqsweep.convert(tiny("mixtral"), "mxfp8", experts=False)
    reasons = {each.why: each.multiply_adds for each in left.skipped}
    assert (
        reasons["experts=False leaves it"]
        == sum(part.multiply_adds for part in stacks) // model.config.num_hidden_layers
    )
