"""Trainings whose ranks share out experts, and what other axes of the mesh do with them, against one process."""

import json
import os
from functools import cache

import pytest
import torch
from cases import DELAYED_IN_PARTS
from safetensors.torch import load_file
from support.parallel.meshed_ranks import EXPERTS, config, outcome, outcome_and_sampled, run
from support.parallel.sharded_training import assert_same
from support.parallel.training_ranks import trainer
from support.ranks import DEVICE, run_ranks
from support.ranks import backend as backend

from hqsweep.sweep.export import export_folder
from hqsweep.train.checkpoint import go_on_from

pytestmark = pytest.mark.slow
HELD = EXPERTS | {"quantized_weights": True}
FIRST = {"steps": 1, "clip": 1e9}
"""One step, whose gradients are those of one process, and are not scaled by their norm, whose last digit is not."""
DELAYED = DELAYED_IN_PARTS
NVFP4 = {"input": "nvfp4", "weight": "nvfp4+2d", "grad_output": "nvfp4+sr"}
TWO = {"dp_shard": 2, "ep": 2}
OF_TWO = [("mxfp8", {"model": model, "parallel": TWO} | FIRST) for model in (EXPERTS, HELD)]
OF_TWO.append((OF_TWO[0][0], OF_TWO[0][1] | {"offload": True}))
CLOSE = [
    (DELAYED, {"model": EXPERTS, "parallel": TWO, "microbatches": 2}),
    ("mxfp8", {"model": HELD, "parallel": TWO, "recompute": "layer", "clip": 0.1}),
    (DELAYED, {"model": HELD, "parallel": TWO}),
]
FOUR = {"dp_shard": 4, "ep": 2}
MESHES = (FOUR, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {"dp_shard": 4, "ep": 4}, FOUR, FOUR)
FEW = EXPERTS | {"experts": 6}
"""Three for each rank of ep, which two ranks cannot share out evenly: each has half of every one's columns or rows."""
HELD_FEW, HELD_FEWER = HELD | {"experts": 6}, HELD | {"experts": 2}
"""Held ones are shared out whole: two to one rank and one to the other, and one to one rank alone."""
OF_FOUR = [
    ("mxfp8", {"model": model, "parallel": mesh} | FIRST)
    for mesh, model in zip(MESHES, (HELD, EXPERTS, EXPERTS, FEW, HELD_FEW), strict=True)
]
SHARED = {"model": {"layers": 1, "ffn": 128}, "clip": 1e9, "steps": 1}
MIXTURE = {"ffn": 128, "experts": 4, "first_moe_layer": 1}
THREE = MIXTURE | {"experts": 3, "shared_expert": True}
MATRICES = [("mxfp8", SHARED | {"model": SHARED["model"] | {"tied": True}}), (DELAYED, SHARED | {"steps": 2})]
MATRICES += [(NVFP4, SHARED), (NVFP4, {"model": THREE, "clip": 1e9, "steps": 2})]
"""Over 2 ranks of tp with as many microbatches, and over tp and the axes that follow."""
TP_ALONE = [(r, c | {"parallel": {"tp": 2}, "microbatches": 2}) for r, c in MATRICES]
HELD_PARTS = [(r, c | {"model": c["model"] | {"quantized_weights": True}}) for r, c in TP_ALONE]
BESIDE = ({"dp_shard": 2}, {"dp_shard": 2}, {"dp_replicate": 2}, {"dp_shard": 2})
OF_FOUR += [(r, c | {"parallel": d | {"tp": 2}}) for (r, c), d in zip(MATRICES, BESIDE, strict=True)]
PARTS_OF_EXPERTS = TWO | {"tp": 2}
HELD_BESIDE = ({"dp_replicate": 2}, {"dp_shard": 2}, {"dp_shard": 2}, {"dp_shard": 2})
OF_FOUR += [
    (r, c | {"parallel": d | {"tp": 2}, "microbatches": 1}) for (r, c), d in zip(HELD_PARTS, HELD_BESIDE, strict=True)
]
HELD_MIXTURE = MIXTURE | {"quantized_weights": True}
OF_FOUR += [("mxfp8", {"model": model, "parallel": PARTS_OF_EXPERTS} | FIRST) for model in (MIXTURE, HELD_MIXTURE)]
WHOLE_EXPERTS = [("mxfp8", {"model": MIXTURE, "parallel": {"tp": 2}, "microbatches": m} | FIRST) for m in (1, 2)]
ONE_LAYER = {"layers": 1, "first_moe_layer": 0}
RESUMES = [
    (DELAYED, {"model": MIXTURE, "parallel": PARTS_OF_EXPERTS}),
    (DELAYED, {"model": HELD_MIXTURE, "parallel": PARTS_OF_EXPERTS}),
    ("mxfp8", {"model": FEW | ONE_LAYER, "parallel": FOUR}),
    (DELAYED, {"model": HELD_FEWER | ONE_LAYER, "parallel": FOUR}),
    (DELAYED, {"model": SHARED["model"] | {"quantized_weights": True}, "parallel": {"dp_shard": 2, "tp": 2}}),
]

UNEVEN = SHARED | {"parallel": {"dp_shard": 3, "tp": 2}, "batch": 6}
"""Over ranks that do not divide a row of any matrix, so that parts of q, k and v are cut along rows once more."""
OF_SIX = [("mxfp8", UNEVEN | {"model": SHARED["model"] | {"quantized_weights": held}}) for held in (False, True)]


@pytest.fixture
def on_gpus(backend):
    return backend != "gloo"


@pytest.fixture(scope="module")
def of_two(tmp_path_factory, backend):
    cases = [*OF_TWO, *CLOSE, *TP_ALONE, *HELD_PARTS, *WHOLE_EXPERTS]
    return run_ranks(2, run, tmp_path_factory.mktemp("two"), cases, HELD_PARTS[1:2], backend=backend)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, backend):
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def of_four(folder, backend):
    return run_ranks(4, run, folder, OF_FOUR, RESUMES, backend=backend)


def alone(linear, changes, parts):
    """outcome() of one process, whose microbatches are those of as many ranks, and sampled() of a single step."""
    one = {key: value for key, value in changes.items() if key not in ("parallel", "offload")}
    one |= {"microbatches": parts * one.get("microbatches", 1)}
    return trained_alone(json.dumps([linear, one], sort_keys=True), os.environ[DEVICE])


@cache
def trained_alone(case, device):
    """The same once for all tests on one device. case: as JSON."""
    linear, one = json.loads(case)
    return outcome_and_sampled(linear, **one) if one.get("steps") == 1 else (outcome(linear, **one), None)


def is_of_experts(name):
    """Whether a name is of the last layer, which has no MLP but that of experts."""
    return name.startswith("layers.1.mlp.fc")


@pytest.mark.feature("H17")
@pytest.mark.parametrize("case", range(len(OF_TWO)))
def test_a_first_step_with_experts_over_two_ranks(of_two, case, on_gpus):
    """All but the experts to the byte as with two microbatches, and experts as with the tokens of both in one."""
    (metrics, expected), _ = alone(*OF_TWO[case], parts=2)
    (_, of_experts), _ = alone(*OF_TWO[case], parts=1)
    expected = expected | {name: value for name, value in of_experts.items() if is_of_experts(name)}
    for own, whole in (each[0][case] for each in of_two):
        for name in ("grad_norm", "val_loss") if on_gpus else ("grad_norm",):  # of wgrads in bfloat16 on GPUs
            assert own[0].pop(name) == pytest.approx(metrics[0][name], rel=1e-5 if on_gpus else 1e-6)
        assert own == [{name: metrics[0][name] for name in own[0]}]
        assert_same(whole, expected)
    assert any(is_of_experts(name) and value.any() for name, value in whole.items() if name.endswith("exp_avg"))


@pytest.mark.parametrize("case", range(2))
@pytest.mark.parametrize("ranks", [2, 4])
def test_statistics_and_operands_of_a_first_step(of_two, of_four, ranks, case):
    """One process has the same, with a microbatch for each group of ep in experts, and for each rank in all else."""
    results, of_ranks = (of_two, OF_TWO[case]) if ranks == 2 else (of_four, OF_FOUR[case])
    parts = {False: ranks, True: ranks // 2}
    rows, operands = zip(
        *(
            ({name(row): row for row in stats if is_of_experts(row["layer"]) == experts},
             {key: x for key, x in captured.items() if is_of_experts(key) == experts})
            for experts, microbatches in parts.items()
            for _, (stats, captured) in [alone(*of_ranks, parts=microbatches)]
        ),
        strict=True,
    )  # fmt: skip
    (stats, captured), *others = (each[2][case] for each in results)
    assert {name(row): row for row in stats} == rows[0] | rows[1] and len(stats) == len(rows[0] | rows[1])
    assert captured.keys() == operands[0].keys() | operands[1].keys()
    assert all(torch.equal(captured[key], x) for each in operands for key, x in each.items())
    assert others == [([], {})] * (ranks - 1)


def name(row):
    """What a row is about."""
    return row["layer"], row["tensor"], row["direction"]


@pytest.mark.parametrize("case", range(len(CLOSE)))
def test_later_steps_with_experts_over_two_ranks_stay_close(of_two, case, on_gpus):
    """Blocks of the experts' wgrads are of other tokens than in one process; on GPUs they are rounded to bfloat16."""
    (metrics, _), _ = alone(*CLOSE[case], parts=2)
    assert of_two[0][0][len(OF_TWO) + case][0] == of_two[1][0][len(OF_TWO) + case][0]
    for step, expected in zip(of_two[0][0][len(OF_TWO) + case][0], metrics, strict=True):
        if on_gpus:
            step, expected = ({"train_loss": own["train_loss"]} for own in (step, expected))
        assert step == pytest.approx(expected, rel=1e-2)  # steps in 4 bits turn small differences into codes


@pytest.mark.feature("H18", "H19")
@pytest.mark.parametrize("case", range(len(MATRICES)))
def test_matrices_over_ranks_whose_parts_other_ranks_share_out(of_two, of_four, case):
    """To the byte as over two ranks of tp, with as many microbatches: sums over tp have the same parts."""
    metrics, expected = of_two[0][0][len(OF_TWO) + len(CLOSE) + case]
    for own, whole in (each[0][len(MESHES) + case] for each in of_four):
        for step, other in zip(own, metrics, strict=True):
            assert step.pop("grad_norm") == pytest.approx(other["grad_norm"], rel=1e-6)
            assert step == {name: value for name, value in other.items() if name != "grad_norm"}
        assert_same(whole, expected)


def test_parts_of_matrices_whose_columns_ranks_do_not_divide(tmp_path, monkeypatch):
    """Gradients are sums of three in another order than over two ranks of tp with as many microbatches; all before them
    is the same. Held weights train to the byte as plain ones."""
    monkeypatch.setenv(DEVICE, "cpu")
    [(linear, changes), _] = OF_SIX
    alone = [(linear, changes | {"parallel": {"tp": 2}, "microbatches": 3})]
    (metrics, expected), *_ = run_ranks(2, run, tmp_path, alone, [])[0][0]
    for (plain, whole), (own, held) in (each[0] for each in run_ranks(6, run, tmp_path, OF_SIX, [])):
        assert own == plain == [pytest.approx(metrics[0], rel=1e-6)]
        assert_same(held, {name: whole[name] for name in held})
        assert any("master_param" in name for name in held)
        first_moments = [name for name in expected if name.endswith("exp_avg")]
        assert any("qkv" in name for name in first_moments)
        for name in first_moments:
            assert torch.allclose(whole[name], expected[name], rtol=1e-4, atol=1e-9), name


@pytest.mark.feature("H21")
@pytest.mark.parametrize("case", range(len(HELD_PARTS)))
def test_held_weights_over_ranks_train_as_plain_ones(of_two, case):
    """To the byte, as operands are made of the same masters under amaxes of the whole."""
    for outcomes, *_ in of_two:
        first = len(OF_TWO) + len(CLOSE)
        (metrics, expected), (own, held) = (outcomes[first + n + case] for n in (0, len(TP_ALONE)))
        assert own == metrics
        compared = [name for name in held if ".states." not in name]
        assert all(torch.equal(held[name], expected[name]) for name in compared)
        assert any("master_param" in name for name in compared)


@pytest.mark.feature("H20")
@pytest.mark.parametrize("case", range(len(HELD_PARTS)))
def test_held_weights_over_ranks_whose_parts_other_ranks_share_out(of_two, of_four, case):
    """To the byte as plain ones over two ranks of tp, but histories of weights, as those of held ones there."""
    first = len(OF_TWO) + len(CLOSE)
    (metrics, expected), (_, held) = (of_two[0][0][first + n + case] for n in (0, len(TP_ALONE)))
    expected = {name: (held if ".states.weight_" in name else expected)[name] for name in held}
    for own, whole in (each[0][len(MESHES) + len(MATRICES) + case] for each in of_four):
        for step, other in zip(own, metrics, strict=True):
            assert step.pop("grad_norm") == pytest.approx(other["grad_norm"], rel=1e-6)
            assert step == {name: value for name, value in other.items() if name != "grad_norm"}
        assert_same(whole, expected)


@pytest.mark.feature("H21")
def test_held_weights_over_ranks_go_on_from_their_checkpoint(of_two):
    for metrics, through, again, content in (each[1][0] for each in of_two):
        assert metrics[1:] == again
        assert_same(content, through)


@pytest.mark.feature("H8", "H17")
@pytest.mark.parametrize("case", range(len(MESHES)))
def test_experts_over_ranks_that_share_out_their_parameters(of_four, case, on_gpus):
    """Experts to the byte as with a microbatch for each group of ep; of sums of four, in another order, the rest."""
    linear, changes = OF_FOUR[case]
    (metrics, expected), _ = alone(linear, changes, parts=4)
    (_, of_experts), _ = alone(linear, changes, parts=4 // changes["parallel"]["ep"])
    for own, whole in (each[0][case] for each in of_four):
        assert own[0] == pytest.approx(metrics[0], rel=1e-5 if on_gpus else 1e-6)
        assert {n: own[0][n] for n in ("train_loss", "expert_load_max")} == {
            n: metrics[0][n] for n in ("train_loss", "expert_load_max")
        }
        for name, value in whole.items():
            if is_of_experts(name):
                assert torch.equal(value, of_experts[name]), name
            elif "exp_avg" in name:
                assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-9), name


@pytest.mark.feature("H8", "H19")
@pytest.mark.parametrize("case", [-2, -1])
def test_parts_of_experts_over_ranks_that_share_out_the_experts(of_two, of_four, case):
    """A first step is to the byte that of tp alone: experts have the tokens of both groups in one microbatch. So is
    that of held ones, which have masters alone to compare."""
    (_, of_experts), (metrics, expected) = of_two[0][0][-2:]
    expected = expected | {name: value for name, value in of_experts.items() if is_of_experts(name)}
    for own, whole in (each[0][case] for each in of_four):
        assert own[0].pop("grad_norm") == pytest.approx(metrics[0]["grad_norm"], rel=1e-6)
        assert own == [{name: value for name, value in metrics[0].items() if name != "grad_norm"}]
        assert_same(whole, {name: expected[name] for name in whole} if case == -1 else expected)


@pytest.mark.feature("H17", "H18", "H19", "H20")
@pytest.mark.parametrize("case", range(len(RESUMES)))
def test_a_training_of_four_ranks_goes_on_from_its_checkpoint(of_four, case, folder):
    for metrics, through, again, content in (each[1][case] for each in of_four):
        assert metrics[1:] == again
        assert_same(content, through)
    exported = load_file(export_folder(folder / str(case) / "step_1", folder / f"{case}.safetensors"))
    one = trainer(config(RESUMES[case][0], **RESUMES[case][1] | {"parallel": {}}))
    go_on_from(one, folder / str(case) / "step_1")
    for name, p in one.model.named_parameters():
        assert torch.equal(exported[name], one.optimizer.master_param(p).cpu()), name
