"""What trials beside each other have for themselves."""

from __future__ import annotations

import pytest

from tfdist.errors import OptionError
from tfdist.launch import hosts
from tfdist.tuning.slots import Slot, divided


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    monkeypatch.setattr(hosts, "cores_here", lambda: [[0, 4], [1, 5], [2, 6], [3, 7]])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")


def test_cores_are_divided_where_there_are_enough():
    assert divided(2, 2) == [Slot((0, 1, 4, 5)), Slot((2, 3, 6, 7))]
    assert divided(3, 1) == [Slot((0, 4)), Slot((1, 5)), Slot((2, 6))]
    assert divided(2, 3) == [Slot(), Slot()]
    assert divided(1, 1) == [Slot()]


def test_gpus_are_divided(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,GPU-a,3")
    assert [slot.gpus for slot in divided(2, 1)] == ["0,2", "GPU-a,3"]
    assert [slot.gpus for slot in divided(3, 1)] == ["0", "2", "GPU-a"]
    with pytest.raises(OptionError, match=r"must have a GPU of its own.* with 4 GPUs"):
        divided(5, 1)
