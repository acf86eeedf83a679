"""benchmarks/user_model.py: every case is a row, and ours trains the model that torch trains."""

import json

from benchmarks import user_model


def test_each_case_is_a_row_beside_the_reference(tmp_path):
    file = tmp_path / "rows.jsonl"
    words = ["--models", "quick", "--recipes", "mxfp8", "--references", "eager", "--device", "cpu", "--turns", "1"]
    user_model.main([*words, "--out", str(file)])
    eager, ours = map(json.loads, file.read_text().splitlines())
    assert eager["case"] == "torch eager" and ours["recipe"] == "mxfp8" and "error" not in eager | ours
    assert ours["ran"] == "there are no graphs on the CPU" and ours["ktokens_s"] > 0 and eager["ms"] > 0


def test_the_first_losses_of_both_are_near(tmp_path):
    shape = user_model.SHAPES["quick"]
    (tmp_path / "config.json").write_text(json.dumps(shape.keys | {"max_position_embeddings": shape.context}))
    data = user_model.Data(shape, "cpu")
    data.next = -1  # the first batch, as the Trainer's
    ours = user_model.Ours(tmp_path, shape, data, "bf16", "cpu")
    ours.trainer.config.train.__dict__["log_every"] = 1
    plain = user_model.plain(tmp_path, data, "eager", "cpu")
    assert abs(plain().item() - ours().loss) < 1e-3


def test_goals_name_models_and_recipes_that_are_there():
    models, recipes = set(user_model.SHAPES), set(user_model.RECIPES)
    assert {(model, name) for model, name in user_model.GOALS} <= {(m, r) for m in models for r in recipes}
