"""Folders of offloaded activations, within one that a user gave; the rest: test_options.py."""

from __future__ import annotations

import os
import subprocess

import pytest

from tfdist.errors import WriteError
from tfdist.training import offload
from tfdist.training.offload import Activations


def test_nothing_of_the_users_is_removed(tmp_path):
    """Whatever its name, and whatever is in it."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f"tfdist-activations-{offload._HERE}-{ended.pid}-abc123"
    mine = tmp_path / "tfdist-activations-study"
    running = tmp_path / f"tfdist-activations-{offload._HERE}-{os.getppid()}-abc123"
    elsewhere = tmp_path / f"tfdist-activations-another-{ended.pid}-abc123"
    with_mine = tmp_path / f"tfdist-activations-{offload._HERE}-{ended.pid}-mine"
    for folder in (left, mine, running, elsewhere, with_mine):
        folder.mkdir()
        (folder / "0").touch()
    (with_mine / "notes").write_text("mine")
    (tmp_path / "tfdist-activations-file").touch()
    link = tmp_path / f"tfdist-activations-{offload._HERE}-{ended.pid}-link"
    link.symlink_to(mine)
    made = Activations(tmp_path)
    assert not left.exists()
    assert (with_mine / "notes").read_text() == "mine"
    assert link.is_symlink()
    assert all((folder / "0").exists() for folder in (mine, running, elsewhere))
    own = made._folder.path
    (own / "0").touch()
    del made
    assert not own.exists()


def test_a_full_disk_is_one_line(tmp_path):
    path = tmp_path / "tfdist-activations-here-1-abc/3"
    error = OSError(f"No space left on device: {path}")
    assert "must be written to offload_dir" in str(offload.explain_folder_error(error, tmp_path))
    assert offload.explain_folder_error(OSError("another"), tmp_path) is None
    assert offload.explain_folder_error(error, None) is None


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(WriteError):
        Activations(tmp_path / "none")
