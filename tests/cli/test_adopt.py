"""tfdist adopt: what it prints, what it asks for, and its exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from records_of_others import example, imagenet, write

from tfdist.records import load_manifest


@pytest.fixture
def folder(tmp_path):
    return imagenet(tmp_path / "imagenet")


def test_adopted_inspected_and_read_otherwise(tfdist, folder):
    code, out, err = tfdist("adopt", "imagenet", "--first-class", "1", "--resize", "4x6", "--pad")
    assert (code, err) == (0, "")
    for words in ("guessed", "image/encoded", "[*, *, 3]", "4x6, padded", "1 subtracted", "75.0%"):
        assert words in out
    code, out, err = tfdist("inspect", "imagenet", "--check")
    assert (code, err) == (0, "")
    assert "from adopted" in out
    assert "clean: every byte of 4 shards" in out
    assert tfdist("adopt", "imagenet", "--resize", "none")[0] == 0
    assert load_manifest(folder).schema.of_role("input")[0].reading.size is None
    code, out, _ = tfdist("adopt", "imagenet")
    assert code == 0
    assert "already" in out


def test_into_another_folder_from_patterns(tfdist, folder, tmp_path):
    options = ["--out", "ours", "--split", "train=*-00000-*", "--split", "test=*-00001-*"]
    options += ["--input", "image/height", "--label", "image/class/label"]
    code, out, err = tfdist("adopt", "imagenet/train-*", *options)
    assert (code, err) == (0, "")
    assert "1 files are of no split: train-00002-of-00003" in out
    assert list(load_manifest(tmp_path / "ours").splits) == ["train", "test"]
    code, out, err = tfdist("inspect", "ours/test", "--check")
    assert (code, err) == (0, "")
    assert f"shards in {folder}" in out
    assert "clean: every byte of 1 shards" in out
    assert not (folder / "manifest.json").exists()


def test_what_cannot_be_guessed_is_listed(tfdist, tmp_path):
    write(tmp_path / "a.tfrecord", [example(a=0.5, b=[0.5, 1.5], label=1, id=b"x7")])
    code, out, err = tfdist("adopt", ".")
    assert code == 2
    for words in ("feature", "whole numbers", "[2]", "0.5, 1.5", "'x7'"):
        assert words in out
    assert err.count("\n") == 1
    assert "--input a --label label" in err


def test_damaged_files_are_listed_and_mistakes_are_one_line(tfdist, folder, tmp_path):
    file = folder / "train-00001-of-00003"
    file.write_bytes(file.read_bytes()[:50])
    code, out, err = tfdist("adopt", "imagenet")
    assert (code, err.count("\n")) == (2, 1)
    assert out.startswith("fault: train-00001-of-00003, record 0, byte 0: the file ends")
    for wrong in (["--split", "train"], ["--max-length", "x"], ["--color", "blue"]):
        code, _, err = tfdist("adopt", "imagenet", *wrong)
        assert (code, err.count("\n")) == (2, 1)
    (tmp_path / "manifest.json").write_text("{}")
    assert "never written over" in tfdist("adopt", "imagenet", "--out", ".")[2]
