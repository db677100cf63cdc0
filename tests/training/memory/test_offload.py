"""Folders of offloaded activations, within one that a user gave; the rest: test_options.py."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys

import pytest

from tfdist.errors import WriteError
from tfdist.training.engine.folder_lock import FolderLock
from tfdist.training.memory import offload
from tfdist.training.memory.offload import Activations


def test_nothing_of_the_users_is_removed(tmp_path):
    """Whatever its name, and whatever is in it."""
    left, running, unlocked, with_mine = (
        tmp_path / f"tfdist-activations-{offload._HERE}-{name}"
        for name in ("left", "running", "unlocked", "with_mine")
    )
    mine = tmp_path / "tfdist-activations-study"
    elsewhere = tmp_path / "tfdist-activations-another-left"
    for folder in (left, mine, running, unlocked, elsewhere, with_mine):
        folder.mkdir()
        (folder / "0").touch()
    for folder in (left, running, elsewhere, with_mine):
        (folder / offload._LOCK).touch()
    of_running = FolderLock(running / offload._LOCK)
    (with_mine / "notes").write_text("mine")
    (tmp_path / "tfdist-activations-file").touch()
    link = tmp_path / f"tfdist-activations-{offload._HERE}-link"
    link.symlink_to(elsewhere)
    made = Activations(tmp_path)
    assert not left.exists()
    assert (with_mine / "notes").read_text() == "mine"
    assert link.is_symlink()
    assert all((folder / "0").exists() for folder in (mine, running, unlocked, elsewhere))
    of_running.release()
    own = made._folder.path
    (own / "0").touch()
    another = Activations(tmp_path)  # Of the same process: its number would tell nothing.
    assert not running.exists()
    assert (own / "0").exists()
    del made, another
    assert not own.exists()
    assert not list(tmp_path.glob(".*"))


def test_what_a_killed_process_leaves_is_removed(tmp_path):
    script = f"""
import os, signal
from tfdist.training.memory.offload import Activations
made = Activations({str(tmp_path)!r})
(made._folder.path / "0").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], timeout=120)
    (left,) = tmp_path.iterdir()
    assert (left / "0").exists()
    made = Activations(tmp_path)
    assert list(tmp_path.iterdir()) == [made._folder.path]


def test_where_there_are_no_locks_nothing_is_removed(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    made = Activations(tmp_path)
    (made._folder.path / "0").touch()
    monkeypatch.setattr(fcntl, "flock", flock)
    Activations(tmp_path)
    assert (made._folder.path / "0").exists()


def test_a_full_disk_is_one_line(tmp_path):
    path = tmp_path / "tfdist-activations-here-1-abc/3"
    error = OSError(f"No space left on device: {path}")
    assert "must be written to offload_dir" in str(offload.explain_folder_error(error, tmp_path))
    assert offload.explain_folder_error(OSError("another"), tmp_path) is None
    assert offload.explain_folder_error(error, None) is None


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(WriteError):
        Activations(tmp_path / "none")
