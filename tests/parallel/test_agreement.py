"""What ranks of a run agree on before its first step: each fact apart from the others, and that a run compares them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.parallel.fork_ranks import config, run
from support.ranks import run_ranks

import hqsweep
from hqsweep.config.job import ConvergenceConfig
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.parallel.wire.collectives import Disagreement
from hqsweep.train import data
from hqsweep.train.model import GPTAdapter

pytestmark = pytest.mark.slow

TWO = {"dp_shard": 2}


def trained(**changes: object) -> ConvergenceConfig:
    """The config of a run over two ranks, with other values for some of its keys."""
    return config(trunk=None, at=2, parallel=TWO).model_copy(update=changes)


def other_data(patch: pytest.MonkeyPatch) -> ConvergenceConfig:
    """The same config, whose data has other tokens here."""
    real = data.load(trained().data)
    patch.setattr(data, "loaded", lambda config: replace(real, hash="0" * 64))
    return trained()


def other_version(module: object) -> Callable[[pytest.MonkeyPatch], ConvergenceConfig]:
    def change(patch: pytest.MonkeyPatch) -> ConvergenceConfig:
        patch.setattr(module, "__version__", "0.0")
        return trained()

    return change


def other_kernels(patch: pytest.MonkeyPatch) -> ConvergenceConfig:
    patch.setattr(convergence, "kernel_digest", lambda device: "0" * 64)
    return trained()


def other_code(patch: pytest.MonkeyPatch) -> ConvergenceConfig:
    patch.setattr(GPTAdapter, "facts", {"model_code": "mine 0123456789ab"})
    return trained()


FACTS = {
    "recipe": lambda patch: trained(recipe=config("mxfp8").recipe),
    "seed": lambda patch: trained(seed=7),
    "data": other_data,
    "the version of hqsweep": other_version(hqsweep),
    "the version of torch": other_version(torch),
    "the numbers of their kernels": other_kernels,
    "config": lambda patch: trained(model=config(layers=2).model),
}
"""What ranks may differ in -> what makes a process differ in it, and gives its config."""
ODD = FACTS | {"the code of the model": other_code}


def facts(config: ConvergenceConfig) -> dict[str, object]:
    return convergence.shared_facts(config, data.loaded(config.data), torch.device("cpu"))


@pytest.mark.feature("H24")
@pytest.mark.parametrize("name", FACTS)
def test_what_differs_is_one_fact_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = facts(trained())
    odd = facts(FACTS[name](monkeypatch))
    assert list(odd) == list(usual) and [key for key in usual if odd[key] != usual[key]] == [name]


def test_where_the_run_lies_and_what_starts_it_is_no_matter() -> None:
    elsewhere = {"runs_dir": "elsewhere", "engine": trained().engine.model_copy(update={"workers": 7})}
    assert facts(trained(**elsewhere)) == facts(trained())


def differing(rank: int, folder: Path) -> list[tuple[str, list]]:
    """What this rank says where rank 1 differs, and the metrics of the run, for each of ODD."""
    said = []
    for name, change in ODD.items():
        sentence, sink = "", ListSink()
        with pytest.MonkeyPatch.context() as patch:
            try:
                run(change(patch) if rank == 1 else trained(), folder / name, sink)
            except Disagreement as refused:
                sentence = str(refused)
        said.append((sentence, sink.metrics))
    return said


@pytest.mark.feature("H24")
def test_a_run_whose_ranks_differ_ends_on_all_of_them_before_its_first_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, differing, tmp_path)
    assert first == second
    for name, (sentence, metrics) in zip(ODD, first, strict=True):
        assert sentence.startswith(f"train.parallel: the ranks disagree in {name}: rank 1 has "), (name, sentence)
        assert metrics == []
