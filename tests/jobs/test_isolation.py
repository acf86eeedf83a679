import gc
import os
import warnings
import weakref

import pytest
import torch

from hqsweep.jobs.isolation import isolated, make_deterministic


class Node:
    """An object that only the collector of cycles can take away."""

    def __init__(self):
        self.itself = self


def test_the_environment_and_what_a_run_held_are_as_before(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    gc.disable()
    try:
        with isolated():
            os.environ |= {"KEPT": "changed", "ADDED": "by the run"}
            held = weakref.ref(Node())
            assert held() is not None
        assert held() is None
    finally:
        gc.enable()
    assert os.environ["KEPT"] == "before" and "ADDED" not in os.environ
    assert gc.get_freeze_count() == 0


def test_a_run_gives_a_warning_that_an_earlier_one_has_given():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            with isolated():
                for _ in range(2):
                    warnings.warn("once per process", stacklevel=1)
    assert len(caught) == 2


def test_a_run_does_not_see_the_random_state_of_another():
    torch.manual_seed(3)
    first = torch.rand(4)
    with isolated():
        torch.manual_seed(3)
    assert not torch.equal(torch.rand(4), first)


@pytest.mark.slow
def test_switches_of_torch_are_as_before(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with isolated():
        make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
