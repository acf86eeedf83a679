"""Keys of the section `model` where a command line puts a user's own model in the place of a YAML's GPT."""

from omegaconf import DictConfig, OmegaConf

from hqsweep.config.model import ModelConfig
from hqsweep.config.user_model import TARGET, HFModelConfig, UserModel

MODEL_TARGET = f"model.{TARGET}"
"""The function that builds a user's own model; it stands for the whole section, whose other keys are its arguments."""


def take_factory(config: DictConfig) -> None:
    """Have a section for a Python function, without the keys of another kind of model."""
    if OmegaConf.select(config, "model.kind") != "factory":
        config["model"] = {"kind": "factory"}


def is_users(config: DictConfig) -> bool:
    """Whether the section is for a user's own model."""
    model = config.get("model")
    return isinstance(model, DictConfig) and bool(model.get("kind"))


def drop_gpt(config: DictConfig) -> None:
    """Leave out what a YAML says of the GPT, where a group for a user's own model was chosen instead."""
    model = config["model"]
    own = (*UserModel.model_fields, *(HFModelConfig.model_fields if model["kind"] == "hf" else ()))
    for key in [key for key in model if key in ModelConfig.model_fields and key not in own]:
        del model[key]
