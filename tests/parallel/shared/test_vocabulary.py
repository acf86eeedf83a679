"""Boxes of a group: made once, made again for more rows, and for none where ranks have GPUs of two kinds."""

from types import SimpleNamespace

import pytest
import torch

from hqsweep.parallel.shared import vocabulary as module
from hqsweep.parallel.shared.vocabulary import meeting

DEVICE = SimpleNamespace(type="cuda", index=0)


@pytest.fixture
def made(monkeypatch):
    """The memories that ranks make, on a CPU that stands for a GPU."""
    made = []

    def shared_memory(group, device, size):
        buffer = torch.zeros(size, dtype=torch.uint8)
        memory = SimpleNamespace(get_buffer=lambda *_: buffer, barrier=lambda: None, buffer_ptrs_dev=1000 + len(made))
        made.append(buffer)
        return memory

    zeros = torch.zeros
    monkeypatch.setattr(module, "_MEETINGS", {})
    monkeypatch.setattr(module, "_MEMORY", [])
    monkeypatch.setattr(module, "shared_memory", shared_memory)
    monkeypatch.setattr(module, "all_say", lambda word, group, agree: agree([word, group.other or word]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))
    return made


def group(size=2, other=None):
    return SimpleNamespace(group_name=f"{size} {other}", size=lambda: size, rank=lambda: 1, other=other)


def test_boxes_are_made_once_and_again_for_more_rows(made, monkeypatch):
    first = meeting(group(), DEVICE, 100)
    assert first[:1] + first[2:] == (1000, 128, 2, 1) and first.state.tolist() == [0, 0, 0]
    assert made[0].shape == (2 * 2 * 128 * 16,) and made[0].eq(0xFF).all()  # halves, ranks, rows, bytes
    assert meeting(group(), DEVICE, 128) is first
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert meeting(group(), DEVICE, 129) is None  # nothing waits inside a graph
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert meeting(group(), DEVICE, 129).rows == 256 and len(made) == 2
    assert meeting(group(), DEVICE, 1).rows == 256


def test_no_boxes_where_no_kernels_could_meet(made):
    assert meeting(group(1), DEVICE, 8) is None and meeting(group(17), DEVICE, 8) is None
    assert meeting(group(), torch.device("cpu"), 8) is None
    assert meeting(group(other="another GPU"), DEVICE, 8) is None and not made
