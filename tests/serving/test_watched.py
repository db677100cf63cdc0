"""When the file of a model is another one, and what is copied of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tfdist.errors import DataError, OptionError
from tfdist.serving.served import find
from tfdist.serving.watched import Watched, copy, place_of


def _replace(file: Path, text: str) -> None:
    """Writes beside it and renames, as trainings do; the time of the file stays that of before."""
    beside = file.with_name(".beside")
    beside.write_text(text)
    if file.exists():
        os.utime(beside, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    beside.replace(file)


@pytest.fixture
def best(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "best.keras"
    file.write_text("first")
    return file


@pytest.fixture
def watched(best, tmp_path) -> Watched:
    found = Watched(best.parent, copy(best, place_of(tmp_path, 1, best)))
    assert (found.look(), found.look()) == (None, None)
    return found


def test_a_file_of_the_same_size_and_time_is_another_one(watched, best):
    _replace(best, "other")
    assert [watched.look() for _ in range(4)] == [None, best, None, None]


def test_what_is_still_written_is_left_alone(watched, best):
    """One byte more at each look; at rest it is taken once."""
    for size in range(6, 12):
        best.write_bytes(b"x" * size)
        assert watched.look() is None
    assert [watched.look() for _ in range(3)] == [best, None, None]


def test_a_training_that_is_faster_than_the_looks_is_followed(watched, best):
    found = []
    for number in range(25):
        _replace(best, f"version {number}")
        found.append(watched.look() is not None)
    assert [number for number, is_taken in enumerate(found) if is_taken] == [9, 19]
    assert [watched.look() for _ in range(2)] == [best, None]


def test_a_folder_that_must_not_be_looked_at_has_no_version(watched, best, monkeypatch):
    def deny(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as denied:
        denied.setattr(Path, "is_file", deny)
        with pytest.raises(OptionError, match=f"found {best.parent}: Permission denied"):
            find(best.parent, name=None)
        assert [watched.look() for _ in range(3)] == [None] * 3
    assert [watched.look() for _ in range(3)] == [None] * 3  # It is that of before.


def test_a_file_that_is_gone_is_no_version_and_one_that_comes_back_is(watched, best):
    best.rename(best.with_name("away"))
    assert [watched.look() for _ in range(3)] == [None] * 3
    best.with_name("away").rename(best)
    assert [watched.look() for _ in range(3)] == [None] * 3  # It is that of before.
    best.unlink()
    best.parent.rmdir()
    assert watched.look() is None
    best.parent.mkdir()
    _replace(best, "third")
    assert [watched.look() for _ in range(2)] == [None, best]


def test_the_best_model_goes_before_the_last_one(watched, best, tmp_path):
    last = best.with_name("model.keras")
    last.write_text("last")
    assert [watched.look() for _ in range(3)] == [None] * 3
    best.unlink()
    assert [watched.look() for _ in range(3)] == [None, last, None]
    (best.parent / ".tfdist-new").mkdir()  # Of a training that is to replace this one.
    (best.parent / ".tfdist-new" / "best.keras").write_text("next")
    assert [watched.look() for _ in range(3)] == [None] * 3


def test_what_was_copied_is_not_taken_once_more(watched, best, tmp_path):
    """It was replaced between the look and the copy."""
    _replace(best, "second")
    assert [watched.look() for _ in range(2)] == [None, best]
    _replace(best, "third")
    to = place_of(tmp_path, 2, best)
    watched.copy(best, to)
    assert to.read_text() == "third"
    assert [watched.look() for _ in range(3)] == [None] * 3


def test_a_file_that_changes_while_it_is_copied_is_no_version(best, tmp_path, monkeypatch):
    def grow(source, target, size) -> None:
        with best.open("a") as file:
            file.write("more")

    monkeypatch.setattr("shutil.copyfileobj", grow)
    with pytest.raises(DataError, match=r"found .*best.keras to .*: that it changed meanwhile"):
        copy(best, place_of(tmp_path, 2, best))


def test_a_copy_that_cannot_be_is_one_line(best, tmp_path):
    best.unlink()
    with pytest.raises(DataError, match="No such file or directory") as found:
        copy(best, place_of(tmp_path, 2, best))
    assert "TFDIST_CACHE" in str(found.value)
