"""Names without wrappers."""

import pytest

from hqsweep.recipe.roles import clean_name


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("", ""),
        ("layers.0.fc", "layers.0.fc"),
        ("_orig_mod.layers.0.fc", "layers.0.fc"),
        ("module._orig_mod.layers.0._checkpoint_wrapped_module.fc", "layers.0.fc"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.fc", "layers.0.fc"),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer", "model.layers.0.self_attn.q_proj"),
        ("module.base_model.model.lm_head", "lm_head"),
        ("layers.0.module.fc", "layers.0.module.fc"),
        ("base_model.encoder.fc", "base_model.encoder.fc"),
    ],
)
def test_wrappers_are_no_part_of_a_name(wrapped, plain):
    assert clean_name(wrapped) == plain
