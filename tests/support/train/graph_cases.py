"""Trainings whose steps are to be graphs."""

from hqsweep.config.job import parse

STOCHASTIC = {"input": "nvfp4+rht+sr", "weight": "nvfp4+2d+sr", "grad_output": "nvfp4+rht+sr"}
DELAYED = {"input": "fp8_delayed", "weight": "fp8_delayed", "grad_output": "fp8_delayed+e5m2|mxfp8"}
DECODED = dict.fromkeys(STOCHASTIC, "nvfp4+sr|mxfp8@rowwise_dequantized")
STAGES = [{"at": 6, "linear": DELAYED}]
CODES = "mxfp8|nvfp4@rowwise_dequantized"
"""Which experts over ranks send."""
EXPERTS = {"experts": 2, "shared_expert": True}
SAMPLED = {"every": 5}
"""Step 5 is sampled, between replays, and 10, the third one of its stage."""

CASES = {
    "bf16": {"recipe": {"linear": "bf16"}},
    "mxfp8": {"recipe": {"linear": "mxfp8"}, "stats": SAMPLED},
    "nvfp4": {"recipe": {"linear": STOCHASTIC}, "stats": SAMPLED},
    "decoded": {"recipe": {"linear": DECODED}},
    "delayed": {"recipe": {"linear": DELAYED}, "stats": SAMPLED},
    "stages": {"recipe": {"linear": STOCHASTIC, "schedule": STAGES}, "stats": SAMPLED},
    "experts": {"recipe": {"linear": "mxfp8", "grouped_linear": STOCHASTIC}, "model": EXPERTS},
    "codes of experts": {"recipe": {"linear": "mxfp8", "grouped_linear": CODES}, "model": EXPERTS},
    "microbatches": {"recipe": {"linear": STOCHASTIC}, "train": {"microbatches": 2}},
    "delayed microbatches": {"recipe": {"linear": DELAYED}, "train": {"microbatches": 2}},
    "held": {"recipe": {"linear": STOCHASTIC}, "model": {"quantized_weights": True}},
    "held delayed": {"recipe": {"linear": DELAYED}, "model": {"quantized_weights": True}},
    "recompute": {"recipe": {"linear": STOCHASTIC}, "train": {"recompute": "layer"}},
}


def config(case, dim=32, **train):
    changes = CASES[case]
    options = {"steps": 12, "batch": 4, "context": 32, "eval_batches": 1, "eval_every": 4, "log_every": 3, "lr": 1e-2}
    return parse(
        {
            "job": "convergence", "sweep": "t", "recipe": {"name": "r", **changes["recipe"]},
            "model": {"dim": dim, "layers": 1, "heads": 2, **changes.get("model", {})},
            "stats": changes.get("stats", {"every": 0}), "data": {"source": "markov", "markov": {"length": 20000}},
            "train": {**options, **changes.get("train", {}), **train},
        }
    )  # fmt: skip
