"""The keys of a run and their plain values, without what its recipe means.

For that torch has to be imported, which takes longer than all else here: who mistypes a key is told without it. What
the recipe means, and what depends on it, is checked in job.py.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from hqsweep.config.data import DataConfig
from hqsweep.config.engine import EngineConfig, TrackConfig
from hqsweep.config.errors import sentence
from hqsweep.config.fork import ForkConfig
from hqsweep.config.model import ModelConfig, has_experts
from hqsweep.config.recipe_text import check_pairs, check_texts
from hqsweep.config.train import StatsConfig, TrainConfig
from hqsweep.config.types import Name, Section
from hqsweep.config.user_model import Model
from hqsweep.errors import UserError


class Job(Section):
    """The keys that all jobs have."""

    sweep: Name
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    runs_dir: str = "runs"
    track: TrackConfig = TrackConfig()
    engine: EngineConfig = EngineConfig()


class RecipeKeys(Section):
    """The keys of a recipe in canonical form: either qfactory and fp8_dpa are given or the sections from linear to
    overrides; the others are None."""

    name: Name
    linear: dict[str, str] | None = None
    grouped_linear: dict[str, str] | None = None
    dpa: dict[str, str] | None = None
    head: dict[str, str] | None = None
    embedding: str | None = None
    norm: str | None = None
    overrides: list[dict[str, Any]] | None = None
    qfactory: str | None = None
    fp8_dpa: bool | None = None
    gemm: str
    schedule: list[dict[str, Any]]


class Training(Job):
    """The keys of a training, whose recipe is whatever came."""

    job: Literal["convergence"]
    recipe: RecipeKeys | Any
    model: Model = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    stats: StatsConfig = StatsConfig()
    fork: ForkConfig | None = None


def check_keys(config: Mapping[str, Any]) -> None:
    """UserError with all that is wrong with the config of a training but for what its recipe means, in one line; then
    with the pairs of formats that no product takes, of the parts that every model of its kind has."""
    if config.get("job") != "convergence":
        return
    check_texts("recipe", config.get("recipe"))
    try:
        model = Training.model_validate(dict(config)).model
    except ValidationError as error:
        raise UserError(sentence(error, Training)) from None
    if not isinstance(model, ModelConfig):
        check_pairs(config["recipe"], ["linear"])
        return
    grouped = ["grouped_linear"] if has_experts(model, model.layers - 1) else []
    check_pairs(config["recipe"], ["linear", *grouped, "dpa", "head"])
