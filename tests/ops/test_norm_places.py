"""Places beside a norm's own outputs are what the extension is given, and are checked before."""

from types import SimpleNamespace

import pytest
import torch

from hqsweep.ops import norm as module

ROWS, COLS = 3, 8


@pytest.fixture
def calls(monkeypatch):
    """What the extension is called with, on a CPU."""
    calls = []
    binding = lambda *arguments: calls.append(arguments)  # noqa: E731
    extension = SimpleNamespace(norm_forward_cuda=binding, norm_backward_cuda=binding)
    monkeypatch.setattr(module, "extension", lambda: extension)
    monkeypatch.setattr(module, "_check_rows", lambda x: None)
    monkeypatch.setattr(module, "_multiprocessors", lambda device: 1)
    monkeypatch.setattr(module, "where", lambda x: ("stream",))
    return calls


def test_copies_are_given_behind_the_ranks_of_the_branch(calls):
    x, gain = torch.zeros(ROWS, COLS), torch.ones(COLS)
    branch, received = (torch.zeros(*lead, ROWS, COLS, dtype=torch.bfloat16) for lead in ((), (1,)))
    copies = [torch.zeros(ROWS, COLS, dtype=torch.bfloat16) for _ in range(2)]
    options = (1e-5, torch.bfloat16, False, None, received, 1)
    module.norm_copied.__wrapped__(x, branch, gain, None, *options, copies=copies)
    addresses = [copy.data_ptr() for copy in copies]
    assert calls[0][-5:] == (received.data_ptr(), 2, 1, addresses, "stream")
    module.norm_copied.__wrapped__(x, None, gain, None, *options[:4], copies=copies)
    assert calls[1][-5:] == (0, 1, 0, addresses, "stream")
    for copy in (copies[0].float(), copies[0][:2], torch.zeros(COLS, ROWS, dtype=torch.bfloat16).t()):
        with pytest.raises(ValueError, match="a copy is"):
            module.norm_copied.__wrapped__(x, None, gain, None, *options[:4], copies=[copy])


def test_a_place_stands_for_the_gradient_of_the_branch(calls):
    total, gain, statistics = torch.zeros(ROWS, COLS), torch.ones(COLS), torch.ones(1, ROWS)
    dh, place = (torch.zeros(ROWS, COLS, dtype=torch.bfloat16) for _ in range(2))
    of_norm = (total, None, gain, statistics, None, None, 0)
    dx, dgain = module.norm_backward_to.__wrapped__(dh, *of_norm, place=place)
    assert dx.dtype is torch.float32 and dgain.shape == (1, COLS)
    assert (dx.data_ptr(), place.data_ptr(), module.DTYPES[torch.bfloat16]) == calls[0][9:12]
    with pytest.raises(ValueError, match="place is"):
        module.norm_backward_to.__wrapped__(dh, *of_norm, place=place.double())
