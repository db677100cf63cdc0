"""Which files are adopted, and their splits."""

from __future__ import annotations

import pytest

from tfdist.errors import DataError, OptionError
from tfdist.records.adopting.file_patterns import divide, find_files


def made(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return find_files(folder)


@pytest.mark.parametrize(
    ("names", "expected", "notes"),
    [
        (
            ["train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"],
            {"train": 2, "validation": 1},
            [],
        ),
        (["train/a.tfrecord", "val/b.tfrecords"], {"train": 1, "validation": 1}, ["val is"]),
        (["x_train2017.record-00000-of-00001", "x_test.tfrec"], {"train": 1, "test": 1}, []),
        (["a.tfrecord.gz", "b.tfrecord"], {"train": 2}, ["no file is named after a split"]),
        (["shard-0.tfrecord", "shard-1.tfrecord"], {"train": 2}, []),
        (["train.tfrecord", "val.tfrecord", "dev.tfrecord"], {"train": 1, "val": 1, "dev": 1}, []),
        (["train.tfrecord", "extra.tfrecord"], {"train": 1, "extra": 1}, []),
        (["train-00000-of-00003", "train-00002-of-00003"], {"train": 2}, ["only 2 are there"]),
    ],
)
def test_splits_go_by_names(tmp_path, names, expected, notes):
    splits, said = divide(made(tmp_path, *names), None, None)
    assert {split: len(files) for split, files in splits.items()} == expected
    assert len(said) == len(notes)
    for note, words in zip(said, notes, strict=True):
        assert words in note


def test_a_file_with_two_names(tmp_path):
    """Its records would count twice."""
    made(tmp_path, "a.tfrecord", "b.tfrecord")
    (tmp_path / "c.tfrecord").symlink_to(tmp_path / "a.tfrecord")
    assert len(find_files(tmp_path).names) == 3  # Without a record there is nothing to count.
    (tmp_path / "a.tfrecord").write_bytes(b"records")
    for source in (tmp_path, tmp_path / "*.tfrecord"):
        with pytest.raises(DataError, match=r"a\.tfrecord and c\.tfrecord, which are one file"):
            find_files(source)
    assert find_files(tmp_path / "[ab].tfrecord").names == ("a.tfrecord", "b.tfrecord")


def test_a_dataset_names_its_splits_itself(tmp_path):
    files = made(
        tmp_path, "d-val.tfrecord-00000-of-00001", "d-unsupervised.tfrecord-00000-of-00001"
    )
    assert list(divide(files, None, "d")[0]) == ["validation", "unsupervised"]


def test_numbers_are_ordered_as_numbers_and_others_are_left_aside(tmp_path):
    files = made(tmp_path, "p-10.tfrecord", "p-9.tfrecord", "README", ".hidden.tfrecord")
    assert files.names == ("p-9.tfrecord", "p-10.tfrecord")
    assert files.aside == ("README",)


def test_what_a_writer_has_not_finished_is_left_aside(tmp_path):
    names = ("_temp-train-0.tfrecord", "_temporary/0/train-1.tfrecord", "train-0.tfrecord")
    files = made(tmp_path, *names)
    assert files.names == ("train-0.tfrecord",)
    assert files.aside == ("_temp-train-0.tfrecord",)


def test_folders_behind_links_are_looked_into_once(tmp_path):
    made(tmp_path / "elsewhere", "train-0.tfrecord")
    made(tmp_path / "data", "val.tfrecord")
    (tmp_path / "data" / "train").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "data")
    assert find_files(tmp_path / "data").names == ("train/train-0.tfrecord", "val.tfrecord")


def test_patterns(tmp_path):
    files = made(tmp_path, "p-0.data.tfrecord", "p-1.data.tfrecord", "sub/q.tfrecord")
    splits, notes = divide(files, {"train": "p-0*", "validation": "q*"}, None)
    assert splits == {"train": ["p-0.data.tfrecord"], "validation": ["sub/q.tfrecord"]}
    assert notes == ["1 files are of no split: p-1.data.tfrecord"]
    for globs, words in (
        ({"train": "p*", "test": "*0*"}, "each file must be of one split"),
        ({"train": "z*"}, "must match files"),
        ({"tr ain": "p*"}, "split's name"),
    ):
        with pytest.raises(OptionError, match=words):
            divide(files, globs, None)
    found = find_files([tmp_path / "p-0.data.tfrecord", tmp_path / "sub"])
    assert (found.folder, found.names) == (tmp_path, ("p-0.data.tfrecord", "sub/q.tfrecord"))
    assert find_files(f"{tmp_path}/p-*").names == ("p-0.data.tfrecord", "p-1.data.tfrecord")


def test_nothing_to_adopt(tmp_path):
    (tmp_path / "README").touch()
    with pytest.raises(DataError, match="found README"):
        find_files(tmp_path)
    with pytest.raises(DataError, match="where there is none"):
        find_files(f"{tmp_path}/*.tfrecord")
    with pytest.raises(DataError, match="found an empty list"):
        find_files([])
