"""Which checkpoints an evaluator takes, and when it ends."""

from __future__ import annotations

import os

import pytest

from tfdist.runs import evaluate_rank
from tfdist.runs.folder import RunFolder


def write(folder, *names, at=0):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
        os.utime(folder / name, ns=(at, at))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    class Waiting(Exception):
        """It would wait for another checkpoint."""

    def waits(_):
        raise Waiting

    monkeypatch.setattr(evaluate_rank.time, "sleep", waits)
    monkeypatch.setattr(evaluate_rank, "emit", lambda event: None)
    write(tmp_path / "checkpoints", "ckpt-4.index", at=1)
    write(tmp_path, "metrics.json", at=1)
    folder = RunFolder(tmp_path)
    folder.waiting = Waiting
    return folder


def test_an_earlier_training_is_no_part_of_the_one_that_replaces_it(folder):
    watch = evaluate_rank._Watch(folder, 4, overwrite=True)
    with pytest.raises(folder.waiting):
        watch.next()
    staged = folder.path / ".tfdist-new"
    staged.mkdir()
    with pytest.raises(folder.waiting):
        watch.next()
    write(staged / "checkpoints", "ckpt-1.index", at=2)
    assert watch.next() == staged / "checkpoints" / "ckpt-1"
    with pytest.raises(folder.waiting):
        watch.next()
    staged.rename(folder.path / ".tfdist-next")  # What was before is there for a moment more.
    with pytest.raises(folder.waiting):
        watch.next()
    (folder.path / "metrics.json").unlink()
    write(folder.path / "checkpoints", "ckpt-4.index", at=3)
    assert watch.next() == folder.path / "checkpoints" / "ckpt-4"
    with pytest.raises(folder.waiting):
        watch.next()
    write(folder.path, "metrics.json", at=4)
    assert watch.next() is None


def test_one_that_had_ended_before_its_evaluator_is_taken_when_none_comes(folder, monkeypatch):
    monkeypatch.setattr(evaluate_rank, "_PATIENCE_S", 0.0)
    newest = folder.path / "checkpoints" / "ckpt-4"
    assert evaluate_rank._Watch(folder, 4, overwrite=True).next() == newest


def test_one_that_is_gone_on_from_is_evaluated_first(folder):
    watch = evaluate_rank._Watch(folder, 8, overwrite=False)
    assert watch.next() == folder.path / "checkpoints" / "ckpt-4"
    with pytest.raises(folder.waiting):
        watch.next()
    write(folder.path, "metrics.json", at=4)
    assert watch.next() is None
