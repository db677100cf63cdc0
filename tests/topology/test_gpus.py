"""Which GPUs a process may use, as CUDA reads it."""

from __future__ import annotations

import pytest

from tfdist.topology.gpus import VISIBLE, visible_gpus


@pytest.mark.parametrize(
    ("told", "names"),
    [
        ("0,1", ["0", "1"]),
        (" 2, GPU-8f1b,MIG-GPU-8f1b/1/0", ["2", "GPU-8f1b", "MIG-GPU-8f1b/1/0"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("NoDevFiles", []),
    ],
)
def test_what_is_no_gpu_ends_the_list(monkeypatch, told, names):
    monkeypatch.setenv(VISIBLE, told)
    assert visible_gpus() == names
