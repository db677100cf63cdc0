"""A folder and what lies below a URL: what is copied, in which order, and what a failure leaves."""

from __future__ import annotations

import os

import pytest

from tfdist.errors import DataError, InUseError, WriteError
from tfdist.records.buckets import mirror as mirror_module
from tfdist.records.buckets.mirror import Mirror, finish
from tfdist.records.buckets.store import Store

URL = "memory://bucket/mirrored"


@pytest.fixture
def mirror(tmp_path):
    """A mirror of an empty folder and an empty place, which are those of the test alone."""
    made = Mirror(tmp_path / "folder", f"{URL}-{tmp_path.name}")
    made.folder.mkdir()
    return made


@pytest.fixture
def put(monkeypatch):
    """The names of what is put, in their order."""
    names: list[str] = []
    original = Store.put
    monkeypatch.setattr(
        Store, "put", lambda self, path, name: (names.append(name), original(self, path, name))
    )
    return names


@pytest.mark.parametrize("size", [10, 10_000])
def test_what_is_there_already_is_not_sent_again(mirror, put, size):
    for name in "abc":
        (mirror.folder / name).write_bytes(name.encode() * size)
    mirror.send("cab")
    assert put == ["c", "a", "b"]
    os.replace(mirror.folder / "b", mirror.folder / "kept")
    (mirror.folder / "b").write_bytes(b"B" * size)  # Another file of that size.
    mirror.send("abc")
    assert put[3:] == ["b"]
    assert mirror.store.read("b") == b"B" * size
    mirror.remove(["b"])
    assert mirror.there == set(mirror.store.sizes()) == {"a", "c"}
    mirror.store.remove("a")  # By another.
    mirror.look()
    mirror.send("abc")
    assert put[4:] == ["a", "b"]


def test_what_was_fetched_is_not_sent_again_and_what_was_not_is_as_before(mirror, put):
    sizes = {}
    for name in "ab":
        mirror.store.write(f"stage/{name}", b"new" * 2000)
        sizes[name] = 6000
    (mirror.folder / "b").write_bytes(b"old")
    with pytest.raises(DataError, match=r"stage/b must have 5999 bytes, but found 6000 bytes"):
        mirror.fetch({**sizes, "b": 5999}, below="stage/")
    with pytest.raises(DataError, match=r"stage/b must be as it was written"):
        mirror.fetch(sizes, {"b": "00000000"}, below="stage/")
    assert sorted(path.name for path in mirror.folder.iterdir()) == ["a", "b"]
    assert (mirror.folder / "b").read_bytes() == b"old"
    mirror.send("ab", below="stage/")
    assert put == ["stage/b"]


@pytest.mark.parametrize(("error", "tries"), [(OSError, 3), (InUseError, 1)])
def test_the_last_occasion_is_tried_again_unless_the_place_is_anothers(monkeypatch, error, tries):
    monkeypatch.setattr(mirror_module, "_BETWEEN_TRIES_S", 0)
    tried = []

    def send():
        tried.append(error("no way there"))
        raise tried[-1]

    with pytest.raises(WriteError, match=r"must hold all shards, but found .*no way.*\. Copy them"):
        finish(send, URL, "shards", "Copy them")
    assert len(tried) == tries


@pytest.mark.parametrize("names", ["../a", "/a", "a/b a//b", "a/b a/./b", "a a/b"])
def test_objects_that_are_no_file_of_their_own(mirror, names):
    """One of two that were one file, a/b and a//b, would be lost."""
    with pytest.raises(DataError, match="must have a plain name of its own, and be below no other"):
        mirror.fetch(dict.fromkeys(names.split(" "), 1))
    assert not any(mirror.folder.iterdir())
