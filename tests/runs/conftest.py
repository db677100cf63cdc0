"""What tests of several files here begin with."""

from __future__ import annotations

import pytest


@pytest.fixture
def model(request, tmp_path, monkeypatch):
    """The function in ``_MODEL`` of the test's file, as other processes find it."""
    (tmp_path / "model.py").write_text(request.module._MODEL)
    monkeypatch.chdir(tmp_path)
    return "model.py:model_fn"
