"""Parts of shards: joined they are what one run writes, byte for byte; nothing else is joined."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from tfdist.errors import DataError, InUseError, OptionError
from tfdist.records import load_manifest, write
from tfdist.records.parts import Part
from tfdist.records.writing import journal, shard_parts
from tfdist.records.writing.images import files as image_files
from tfdist.records.writing.journal import Journal, LookedAt
from tfdist.records.writing.shard_parts import folders_of, merge
from tfdist.records.writing.streams import writer as stream_writer

OF_TABLE = {"label": "label", "num_shards": 3, "split": "train=3,validation=1"}


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "in" / "table.csv"
    path.parent.mkdir()
    path.write_text("a,note,label\n" + "".join(f"{n},word {n},{n % 3}\n" for n in range(80)))
    return path


@pytest.fixture
def photos(tmp_path):
    """Of several sizes, in splits, with one that is broken behind its header."""
    rng = np.random.default_rng(0)
    for number in range(42):
        split = "train" if number % 3 else "val"
        path = tmp_path / "photos" / split / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (5 + number % 4, 6, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-30])
    return tmp_path / "photos"


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


OF_PHOTOS = {"num_shards": 4, "skip_bad": True, "resize": "4x4"}


@pytest.mark.parametrize("order", [(2, 1), (3, 1, 2)])
def test_parts_of_photos_are_the_bytes_of_one_run(tmp_path, photos, order):
    one = write(photos, tmp_path / "one", **OF_PHOTOS)
    assert one.left_out == {"unreadable image": 1}
    for number in order:
        part = f"{number}/{len(order)}"
        mine = write(photos, tmp_path / "all", **OF_PHOTOS, part=part, workers=number)
        records = [split.records for split in mine.splits.values()]
        assert 0 < sum(records) < 41
        assert not (tmp_path / "all").exists()
        with pytest.raises(DataError, match=r"must have a manifest\.json"):
            load_manifest(tmp_path / f"all.part-{number}-of-{len(order)}")
    manifest, parts = merge(tmp_path / "all")
    assert (manifest, parts) == (one, len(order))
    assert files_of(tmp_path / "all") == files_of(tmp_path / "one")
    assert "manifest.offsets" in names_in(tmp_path / "all")
    assert names_in(tmp_path) == ["all", "one", "photos"]


@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        ("csv", {}),
        ("csv", {"compression": "gzip", "stratify": True, "num_shards": 2}),
        ("tsv", {"num_shards": None, "partition": "by:note", "text": None, "label": "label"}),
    ],
)
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_a_table_are_the_bytes_of_one_run(tmp_path, table, suffix, options, parts):
    if suffix == "tsv":
        text = table.read_text().replace(",", "\t")
        (table := table.with_suffix(".tsv")).write_text(text)
    options = {**OF_TABLE, **options}
    write(table, tmp_path / "one", **options)
    for number in reversed(range(1, parts + 1)):
        write(table, tmp_path / "all.d", **options, part=f"{number}/{parts}")
    merge(tmp_path / "all.d")
    assert files_of(tmp_path / "all.d") == files_of(tmp_path / "one")


@pytest.mark.parametrize("kind", ["texts", "npz", "arrays", "digits", "list"])
def test_parts_of_whatever_is_known_as_a_whole(tmp_path, kind):
    x, y = np.arange(120.0).reshape(40, 3), np.arange(40) % 3
    source = {"digits": "digits", "arrays": (x, y)}.get(kind, tmp_path / "in")
    if kind == "list":
        source = [{"x": row, "label": number} for row, number in zip(x, y, strict=True)]
    if kind == "npz":
        np.savez(source := tmp_path / "in.npz", x=x, label=y)
    for number in range(12 if kind == "texts" else 0):
        path = tmp_path / "in" / "ab"[number % 2] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {number}")
    write(source, tmp_path / "one", num_shards=2)
    for part in ("2/2", "1/2"):
        write(source, tmp_path / "all", num_shards=2, part=part)
    merge(tmp_path / "all")
    assert files_of(tmp_path / "all") == files_of(tmp_path / "one")


def test_all_parts_together_look_at_each_photo_once(tmp_path, photos, monkeypatch):
    looked, interrupted, undecodable = [], [], image_files.undecodable

    def counted(data):
        looked.append(data)
        if len(looked) == 20 and not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        return undecodable(data)

    monkeypatch.setattr(image_files, "undecodable", counted)
    monkeypatch.setattr(image_files, "_AT_ONCE", 3)
    with pytest.raises(KeyboardInterrupt):
        write(photos, tmp_path / "all", **OF_PHOTOS, part="1/3", workers=1)
    noted = 3 * len(Journal(tmp_path / "all.part-1-of-3.unfinished" / "images.jsonl").entries)
    assert 0 < noted < 42
    looked.clear()
    # Notes of other options are not taken, one way or the other.
    write(photos, tmp_path / "all", **{**OF_PHOTOS, "fit": "crop"}, part="3/3")
    assert len(looked) == 42
    looked.clear()
    write(photos, tmp_path / "all", **OF_PHOTOS, part="2/3")
    assert len(looked) == 42 - noted
    looked.clear()
    write(photos, tmp_path / "all", **OF_PHOTOS, part="3/3", overwrite=True)
    write(photos, tmp_path / "all", **OF_PHOTOS, part="1/3", resume=True)
    assert not looked
    merge(tmp_path / "all")
    write(photos, tmp_path / "one", **OF_PHOTOS)
    assert files_of(tmp_path / "all") == files_of(tmp_path / "one")


def test_blocks_are_divided_and_seen_while_others_run(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_OPENED_A_SECOND", 1e9)
    paths = [tmp_path / str(number) for number in range(3)]
    each = [
        LookedAt(
            path, lambda: None, path, of=part, others=[p for p in paths if p != path], key="key"
        )
        for path, part in zip(paths, Part(1, 3).others, strict=True)
    ]
    firsts = range(0, 640, 64)
    orders = [of.in_turn(firsts) for of in each]
    assert all(sorted(order) == list(firsts) for order in orders)
    assert orders[0][:3] + orders[1][:3] + orders[2][:4] == list(firsts)
    each[0].add(0, ["a"])
    each[1].add(192, ["b"])
    assert each[2].found() == {0: ["a"], 192: ["b"]}
    with paths[0].open("ab") as file:
        file.write(b"12345678 cut")
    each[1].add(256, ["c"])
    assert each[0].found() == {192: ["b"], 256: ["c"]}
    assert each[2].found() == {0: ["a"], 192: ["b"], 256: ["c"]}


_STOPPED = """
import sys, time
from tfdist.cli.main import main
from tfdist.records.writing import column_shards

class Stopped(column_shards.ShardFile):
    def write(self, data):
        if (self.path.parents[1] / "shards.jsonl").exists():  # One shard is whole.
            time.sleep(60)
        super().write(data)

column_shards.ShardFile = Stopped
main()
"""


@pytest.mark.timeout(90)
def test_a_part_that_is_killed_goes_on_and_a_second_one_is_refused(tmp_path, photos, capsys):
    write(photos, tmp_path / "one", **OF_PHOTOS)
    out, left = tmp_path / "all", tmp_path / "all.part-1-of-2.unfinished"
    options = ["--num-shards", "4", "--skip-bad", "--resize", "4x4", "--part", "1/2", "--resume"]
    options += ["--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", _STOPPED, "shard", str(photos), str(out), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (left / "shards.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.02)
        with pytest.raises(InUseError, match="one process at a time"):
            write(photos, out, **OF_PHOTOS, part="1/2", resume=True)
        write(photos, out, **OF_PHOTOS, part="2/2")  # It does not mind the other one.
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
    with pytest.raises(
        DataError, match=r"1 of 2 missing or not whole yet: 1\. .* part='1/2' resume=True"
    ):
        merge(out)
    capsys.readouterr()
    write(photos, out, **OF_PHOTOS, part="1/2", resume=True)
    assert "went on with what was kept" in capsys.readouterr().out
    merge(out)
    assert files_of(out) == files_of(tmp_path / "one")
    assert names_in(tmp_path) == ["all", "one", "photos"]


def test_a_whole_part_is_left_as_it_is(tmp_path, table, capsys):
    out, part = tmp_path / "all", tmp_path / "all.part-1-of-2"
    first = write(table, out, **OF_TABLE, part="1/2", resume=True)
    assert [shard.file for split in first.splits.values() for shard in split.shards] == [
        *("train-00000-of-00003.tfrecord", "train-00002-of-00003.tfrecord"),
        "validation-00001-of-00003.tfrecord",
    ]
    before = {path: path.stat().st_ino for path in part.iterdir()}
    capsys.readouterr()
    assert write(table, out, **OF_TABLE, part="1/2", resume=True, workers=2) == first
    assert capsys.readouterr().out == f"tfdist: {part} is there whole: nothing was written\n"
    with pytest.raises(DataError, match="Keep it with resume=True, or write it again with overwri"):
        write(table, out, **OF_TABLE, part="1/2")
    with pytest.raises(
        OptionError, match=r"seed 1 where it had 0\. Give it the same, or begin anew"
    ):
        write(table, out, **OF_TABLE, part="1/2", seed=1, resume=True)
    table.write_text(table.read_text() + "9,last,1\n")
    with pytest.raises(DataError, match="the source as it was when the run began"):
        write(table, out, **OF_TABLE, part="1/2", resume=True)
    assert {path: path.stat().st_ino for path in part.iterdir()} == before
    assert names_in(tmp_path) == [part.name, "in"]
    write(table, out, **OF_TABLE, part="1/2", overwrite=True)
    write(table, out, **OF_TABLE, part="2/2")
    merge(out)
    write(table, tmp_path / "one", **OF_TABLE)
    assert files_of(out) == files_of(tmp_path / "one")


def test_a_whole_part_goes_only_when_another_one_is_there(tmp_path, table):
    out, part = tmp_path / "all", tmp_path / "all.part-1-of-2"
    write(table, out, **OF_TABLE, part="1/2")
    before = files_of(part)
    with pytest.raises(DataError, match="must have the column 'lable'"):
        write(table, out, **OF_TABLE | {"label": "lable"}, part="1/2", overwrite=True)
    (part / "notes.txt").write_text("mine")
    with pytest.raises(
        DataError, match=r"nothing but its part to be written again, but found notes\.txt"
    ):
        write(table, out, **OF_TABLE, part="1/2", overwrite=True)
    (part / "notes.txt").unlink()
    assert files_of(part) == before
    assert names_in(tmp_path) == [part.name, "in"]
    next(part.glob("train*")).unlink()
    write(table, out, **OF_TABLE, part="1/2", resume=True)
    assert files_of(part).keys() == before.keys()
    assert names_in(tmp_path) == [part.name, "in"]


def test_a_whole_part_of_other_data_in_memory_is_not_kept(tmp_path):
    x, y = np.arange(80, dtype=np.float32).reshape(40, 2), np.arange(40) % 2
    out, part = tmp_path / "all", tmp_path / "all.part-1-of-2"
    write((x, y), out, num_shards=4, part="1/2")
    before = files_of(part)
    with pytest.raises(DataError, match="must find the records that the run which was ended foun"):
        write((x + 1, y), out, num_shards=4, part="1/2", resume=True)
    assert files_of(part) == before
    write((x, y), out, num_shards=4, part="1/2", resume=True)
    assert {name for name in files_of(part) if "part" not in name} <= before.keys()
    assert names_in(tmp_path) == [part.name]


def test_what_does_not_belong_together_is_not_joined(tmp_path, table):
    out, last = tmp_path / "all", tmp_path / "all.part-3-of-3"
    with pytest.raises(
        OptionError, match=r"none of .*all that is whole\. Make them: `tfdist shard SOURCE"
    ):
        merge(out)

    def refused(words):
        with pytest.raises(DataError, match=words):
            merge(out)
        assert not out.exists()
        assert len(folders_of(out)) >= 3

    for number in (1, 2, 3):
        write(table, out, **{**OF_TABLE, "seed": number // 3}, part=f"{number}/3")
    refused("of the same options, records, but found others in part 3 than in part 1")
    text = table.read_text()
    table.write_text(text.replace("word 7", "WORD 7"))
    write(table, out, **OF_TABLE, part="3/3", overwrite=True)
    refused("of the same files of the source, with their sizes and times, but found others in")
    table.write_text(text)
    for number in (1, 2, 3):
        write(table, out, **OF_TABLE, part=f"{number}/3", overwrite=True)
    write(table, out, **OF_TABLE, part="1/2")
    refused("of one number of parts, but found parts of 2 and parts of 3")
    shard_parts.remove(tmp_path / "all.part-1-of-2", shard_parts.read_note(folders_of(out)[0]))
    shard = sorted(last.glob("*.tfrecord"))[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + b"?")
    refused(rf"others in part 3, as .*{shard.name}\. Make each again, with part='3/3' overwrite")
    shard.unlink()
    refused("others in part 3")
    write(table, out, **OF_TABLE, part="3/3", overwrite=True)
    merge(out)
    with pytest.raises(OptionError, match=r"all, which is there, and no part beside it\."):
        merge(out)
    with pytest.raises(DataError, match="new or empty folder"):
        write(table, out, **OF_TABLE, part="1/3", resume=True)


def test_shards_are_copied_where_a_file_has_one_name_alone(tmp_path, table, monkeypatch):
    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    write(table, tmp_path / "one", **OF_TABLE)
    for part in ("1/2", "2/2"):
        write(table, tmp_path / "all", **OF_TABLE, part=part)
    (tmp_path / "all.part-1-of-2" / "mine.txt").write_text("mine")
    monkeypatch.setattr(os, "link", link)
    merge(tmp_path / "all")
    assert files_of(tmp_path / "all") == files_of(tmp_path / "one")
    assert files_of(tmp_path / "all.part-1-of-2") == {"mine.txt": b"mine"}


def test_what_cannot_be_divided_says_so(tmp_path, table, monkeypatch):
    out = tmp_path / "all"
    with pytest.raises(OptionError, match="as many parts as there are shards, but found 7/7 of 6"):
        write(table, out, **OF_TABLE, part="7/7")
    with pytest.raises(OptionError, match="the number of a part, from 1 on"):
        write(table, out, part="0/2")
    with pytest.raises(OptionError, match="overwrite and part must go with a folder on this"):
        write(table, "s3://bucket/out", part="1/2")
    write(table, tmp_path / "one", **OF_TABLE)
    with pytest.raises(OptionError, match="part must go with data from which records are made"):
        write(tmp_path / "one", out, part="1/2")
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)
    with pytest.raises(OptionError, match="part must go with a source whose records are all known"):
        write(lambda: iter([{"x": np.zeros(9)}] * 80), out, part="1/2", batched=False)
    assert names_in(tmp_path) == ["in", "one"]
