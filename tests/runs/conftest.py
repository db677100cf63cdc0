"""What tests of several files here begin with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def model(request, tmp_path, monkeypatch):
    """The function in ``_MODEL`` of the test's file, as other processes find it."""
    (tmp_path / "model.py").write_text(request.module._MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    return "model.py:model_fn"
