"""Histories of delayed scaling pass between hqsweep's states and the pickles of TransformerEngine's checkpoints."""

import pickle
import sys
import warnings
from types import ModuleType

import pytest
import torch

from hqsweep import compat
from hqsweep.compat import DelayedScaling, autocast, extra_state, transformer_engine_state_dict
from hqsweep.formats.inputs import draw

RECIPE = DelayedScaling(amax_history_len=4)
D = 64
BUILT = {
    "Linear": lambda: compat.Linear(D, D),
    "LayerNormLinear": lambda: compat.LayerNormLinear(D, D),
    "LayerNormMLP": lambda: compat.LayerNormMLP(D, 96),
    "GroupedLinear": lambda: compat.GroupedLinear(2, D, D),
    "TransformerLayer": lambda: compat.TransformerLayer(D, 96, 4, hidden_dropout=0.0, attention_dropout=0.0),
}
COLUMNS = {"Linear": (3, 2), "LayerNormLinear": (3, 2), "LayerNormMLP": (6, 4), "GroupedLinear": (6, 4)}
"""Module -> the columns of its forward and backward histories in TransformerEngine."""


def step(module: torch.nn.Module, number: int) -> list[torch.Tensor]:
    x = (draw("normal", 32, D, number).float() * 2.0**number).view(32, 1, D).requires_grad_()
    with autocast(recipe=RECIPE):
        y = module(x[:, 0], [12, 20]) if isinstance(module, compat.GroupedLinear) else module(x)
    y.square().sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize("kind", BUILT)
def test_histories_go_there_and_back(kind):
    """The next step of the loaded module is that of the saved one, to the bit."""
    torch.manual_seed(0)
    module, fresh = BUILT[kind](), BUILT[kind]()
    for number in range(3):
        step(module, number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = transformer_engine_state_dict(module)
        assert not any("states." in key for key in state)
        fresh.load_state_dict(state)
    assert all(map(torch.equal, step(fresh, 3), step(module, 3)))


class Format:
    """TransformerEngine's Format, as its pickle names it."""

    def __init__(self, pair: object) -> None:
        self.pair = pair

    def __reduce__(self) -> tuple:
        return type(self), (self.pair,)


class DelayedScalingOfTheirs:
    """TransformerEngine's DelayedScaling."""


@pytest.fixture
def theirs(monkeypatch):
    """The module transformer_engine.common.recipe, as far as its pickles need it."""
    names = {"Format": Format, "DelayedScaling": DelayedScalingOfTheirs, "_FormatHelper": extra_state._Largest}
    module = ModuleType(extra_state.RECIPES)
    for name, made in names.items():
        made = type(name, (made,), {"__module__": extra_state.RECIPES, "__qualname__": name})
        setattr(module, name, made)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, extra_state.RECIPES, module)
    return module


@pytest.mark.parametrize("kind", COLUMNS)
def test_what_is_written_has_their_shapes_and_names(kind, theirs):
    module = BUILT[kind]()
    for number in range(2):
        step(module, number)
    state = pickle.loads(transformer_engine_state_dict(module)["_extra_state"].numpy().tobytes())
    forward, backward = COLUMNS[kind]
    assert state["amax_history_fwd"].shape == (4, forward) and state["scale_fwd"].shape == (forward,)
    assert state["amax_history_bwd"].shape == (4, backward) and state["scale_bwd"].shape == (backward,)
    assert type(state["recipe"]) is theirs.DelayedScaling and state["recipe"].amax_history_len == 4
    assert type(state["recipe"].fp8_format) is theirs.Format
    assert tuple(state["recipe"].fp8_format.pair) == (448, 57344)
    history = state["amax_history_fwd"][:, 0]  # of the input: entry 0 is the next step's, the last one the latest
    assert history[0] == 0 and history[-1] > 0 and history[-2] > 0 and history[1] == 0
    torch.testing.assert_close(state["scale_fwd"][0], 448 / history.max())
    assert state["extra_fp8_variables"] == {"fp8_checkpoint": True, "num_gemms": forward // 3}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_module_shows_its_histories_as_fp8_meta(kind):
    module = BUILT[kind]()
    assert module.fp8_meta == {}
    for number in range(2):
        step(module, number)
    meta, columns = module.fp8_meta, COLUMNS[kind]
    assert (meta["num_gemms"], meta["scaling_bwd"].amax_history.shape) == (columns[0] // 3, (4, columns[1]))
    fresh = BUILT[kind]()
    fresh.load_state_dict(transformer_engine_state_dict(module))
    for which in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(fresh.fp8_meta[which].amax_history, meta[which].amax_history)
        assert meta[which].amax_history[2:, 0].all()


def test_a_state_of_theirs_gives_amaxes_and_scales(theirs):
    recipe = theirs.DelayedScaling()
    recipe.__dict__ |= {"margin": 1, "fp8_format": theirs.Format((448.0, 57344.0)), "amax_history_len": 4}
    histories = torch.tensor([[0.0, 0, 0], [1, 2, 0], [4, 3, 0], [2, 5, 0]])
    state = {
        "recipe": recipe, "amax_history_fwd": histories, "scale_fwd": torch.tensor([56.0, 44.8, 1.0]),
        "amax_history_bwd": histories[:, :2], "scale_bwd": torch.tensor([57344.0 / 8, 1.0]), "extra_fp8_variables": {},
    }  # fmt: skip
    value = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
    module = compat.Linear(D, D)
    module.load_state_dict(module.state_dict() | {"_extra_state": value})
    states = module.states
    assert torch.equal(states["input_rowwise"].history, histories[:, 0]) and states["input_columnwise"].amax == 4
    assert states["weight_rowwise"].amax == 5 and states["grad_output_rowwise"].amax == 4
    assert states["input_rowwise"].step is None


class Evil:
    def __reduce__(self):
        return print, ("code has run",)


@pytest.mark.parametrize("content", [Evil(), {"recipe": None}, [1]], ids=["code", "no histories", "a list"])
def test_what_is_no_state_is_not_read_and_runs_nothing(content, capsys):
    value = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
    module = compat.Linear(D, D)
    with pytest.warns(UserWarning, match="Linear: _extra_state of the checkpoint is a pickle that does not"):
        module.load_state_dict(module.state_dict() | {"_extra_state": value})
    assert "code has run" not in capsys.readouterr().out
