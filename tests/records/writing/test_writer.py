"""Writing: the files, the options, and that nothing is left of what was not finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from tfdist.errors import DataError, OptionError
from tfdist.records import adopt, check, load_manifest, write


def arrays(num_records=50):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (num_records, 4, 4, 1), np.uint8), np.arange(num_records) % 5


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_and_manifest(tmp_path):
    out = tmp_path / "new" / "data"
    manifest = write(arrays(), out, num_shards=3, seed=7)
    names = sorted(path.name for path in out.iterdir())
    assert names == ["manifest.json"] + [
        f"{split}-{number:05d}-of-00003.tfrecord"
        for split in ("train", "validation")
        for number in range(3)
    ]
    assert manifest == load_manifest(out)
    assert (manifest.seed, manifest.source, manifest.compression) == (7, "arrays", "none")
    for split in manifest.splits.values():
        sizes = [shard.records for shard in split.shards]
        assert max(sizes) - min(sizes) <= 1
        for shard in split.shards:
            data = (out / shard.file).read_bytes()
            assert len(data) == shard.bytes
            assert f"{crc32c(data):08x}" == shard.checksum
    assert check(out) == []
    assert [path.name for path in out.parent.iterdir()] == ["data"]


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_workers_do_not_change_a_byte(tmp_path, compression):
    for workers in (1, 2):
        write(arrays(), tmp_path / str(workers), compression=compression, workers=workers)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


def test_the_seed_decides_the_order(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write(arrays(), tmp_path / name, seed=seed)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert files_of(tmp_path / "a") != files_of(tmp_path / "c")


def test_a_small_later_split_has_a_shard_for_each_record(tmp_path):
    manifest = write(arrays(12), tmp_path / "data", num_shards=4)
    assert len(manifest.splits["train"].shards) == 4
    assert [shard.records for shard in manifest.splits["validation"].shards] == [1, 1]


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "data").mkdir()
    write(arrays(), tmp_path / "data")
    assert check(tmp_path / "data") == []


def test_progress_counts_to_all_records(tmp_path):
    seen = []
    write(arrays(), tmp_path / "data", workers=2, progress=lambda *now: seen.append(now))
    assert seen[-1] == (50, 50)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_shards": 0}, OptionError, "num_shards must be at least 1"),
        ({"workers": 0}, OptionError, "workers must be at least 1"),
        ({"seed": -1}, OptionError, "seed must be 0 or more"),
        ({"seed": None}, OptionError, "seed must be a whole number, but found None"),
        ({"num_shards": "4"}, OptionError, "num_shards must be a whole number, but found '4'"),
        ({"workers": 2.5}, OptionError, "workers must be a whole number, but found 2.5"),
        ({"compression": "zip"}, OptionError, "Choose one of none, gzip"),
        ({"split": "train=1,validation"}, OptionError, "NAME=SHARE"),
        ({"split": 5}, OptionError, "NAME=SHARE, but found 5"),
        ({"part": 5}, OptionError, "number of a part, from 1 on, and of all parts, but found 5"),
        ({"labels": 5}, OptionError, "labels must be a path, but found 5"),
        ({"split": "train=1000,test=1"}, DataError, "split 'test'"),
        ({"num_shards": 43}, DataError, "42 records for 43 shards"),
        ({"label": "y"}, DataError, "must go with a table or a .npz file"),
    ],
)
def test_options_that_cannot_hold(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        write(arrays(), tmp_path / "data", **options)
    assert list(tmp_path.iterdir()) == []


def test_stratify_needs_class_ids(tmp_path):
    images, _ = arrays()
    with pytest.raises(DataError, match="class ids"):
        write((images, np.zeros(50, np.float32)), tmp_path / "data", stratify=True)


def test_what_exists_is_not_overwritten(tmp_path):
    out = tmp_path / "data"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(DataError, match="which holds something"):
        write(arrays(), out)
    assert files_of(out) == {"mine": b"x"}
    with pytest.raises(DataError, match="which is a file"):
        write(arrays(), out / "mine")


@pytest.mark.parametrize("name", ["n" * 300, "a\0b"])
def test_a_name_that_no_file_can_have(tmp_path, name):
    place = tmp_path / name
    for run in (
        lambda: write("digits", place),
        lambda: write(str(place), tmp_path / "new"),
        lambda: load_manifest(place),
        lambda: adopt([place]),
    ):
        with pytest.raises(DataError, match="a path must be one that can be looked at"):
            run()


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="must be writable"):
        write(arrays(), tmp_path / "file" / "data")


def test_an_image_that_breaks_while_writing_leaves_nothing(tmp_path):
    from PIL import Image

    source = tmp_path / "images"
    for number in range(12):
        path = source / "a" / f"{number:02d}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64)).save(path)
    # The header is whole, the pixels are not.
    broken = source / "a" / "07.bmp"
    broken.write_bytes(broken.read_bytes()[:500])
    out = tmp_path / "out" / "data"
    with pytest.raises(DataError, match=r"07\.bmp"):
        write(source, out, decode=False)
    assert list(out.parent.iterdir()) == []


_SLOW_WRITE = """
import sys, time
import numpy as np
from tfdist.records import write
from tfdist.records.writing.streams import writer
writer.HEAD_BYTES = 200
def progress(done, total):
    print(done, flush=True)
    time.sleep(0.2)
write(((x, 0) for x in np.zeros((20000, 1000), np.uint8)), sys.argv[1], progress=progress)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_signal_leaves_nothing_of_a_stream(tmp_path, number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW_WRITE, str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        process.stdout.readline()
        assert len(list(tmp_path.iterdir())) == 1
        os.kill(process.pid, number)
        process.stdout.read()
        assert process.wait(30) == code
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


def test_writing_and_checking_need_no_tensorflow(tmp_path):
    program = (
        "import sys; from tfdist.records import check, write; "
        "from pathlib import Path; from tfdist.records.clients.shard_store import ShardStore; "
        "manifest = write('digits', sys.argv[1], clients=5); assert check(sys.argv[1]) == []; "
        "print(ShardStore.of_split(Path(sys.argv[1]), 'train', manifest).skew()); "
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "d")], check=True, timeout=60)


def test_a_shard_for_each_client(tmp_path):
    options = {"clients": 7, "partition": "dirichlet:0.3"}
    manifest = write(arrays(), tmp_path / "a", workers=2, **options)
    assert manifest == load_manifest(tmp_path / "a")
    train, validation = manifest.splits["train"], manifest.splits["validation"]
    assert (train.partition, validation.partition) == ("dirichlet:0.3", None)
    assert [shard.file for shard in train.shards][::6] == [
        "train-00000-of-00007.tfrecord",
        "train-00006-of-00007.tfrecord",
    ]
    assert list(train.clients) == [f"client-{number}" for number in range(7)]
    assert sum(shard.records for shard in train.shards) == 42
    for shard in train.shards:
        assert sum(shard.class_counts.values()) == shard.records
    assert (validation.clients, len(validation.shards)) == ({}, 4)
    assert check(tmp_path / "a") == []
    write(arrays(), tmp_path / "b", **options)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_a_client_for_each_value_of_a_csv_column(tmp_path):
    rows = "".join(f"{'xyz'[n % 3]} ,{n},{n % 2}\n" for n in range(30))
    (tmp_path / "t.csv").write_text("place,a,label\n" + rows)
    manifest = write(tmp_path / "t.csv", tmp_path / "out", split="train=1", partition="by:place")
    assert list(manifest.splits["train"].clients) == ["x", "y", "z"]
    assert manifest.schema.features[0].columns == ("a",)
    manifest = write(
        tmp_path / "t.csv", tmp_path / "l", label="place", drop="label", partition="by:place"
    )
    assert list(manifest.splits["train"].clients) == ["x", "y", "z"]
    assert manifest.schema.features[0].columns == ("a",)


def test_a_client_for_each_value_of_an_array(tmp_path):
    images, labels = arrays(12)
    user = np.array(["amy", "bob", "eve"] * 4)
    np.savez(tmp_path / "t.npz", x=images, y=labels, user=user)
    sources = (tmp_path / "t.npz", ({"x": images, "user": user}, labels))
    for number, source in enumerate(sources):
        out = tmp_path / str(number)
        manifest = write(source, out, split="train=1", partition="by:user")
        assert list(manifest.splits["train"].clients) == ["amy", "bob", "eve"]
        assert [feature.name for feature in manifest.schema.of_role("input")] == ["x"]
    manifest = write("digits", tmp_path / "digits", partition="by:label")
    counts = [shard.class_counts for shard in manifest.splits["train"].shards]
    assert [list(ids) for ids in counts] == [[number] for number in range(10)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"clients": 43}, DataError, "42 records for 43 clients"),
        ({"clients": 22, "partition": "shards:2"}, DataError, "22 clients of 2 shards each"),
        ({"clients": 0}, OptionError, "at least 1"),
        ({"partition": "shards:2"}, OptionError, "--clients N"),
        ({"clients": 3, "num_shards": 4}, OptionError, "every client must have one shard"),
        ({"clients": 3, "partition": "dirichlet:0"}, OptionError, "positive number"),
        ({"clients": 3, "partition": "sorted"}, OptionError, "Choose one of iid, dirichlet:ALPHA"),
        ({"clients": 3, "partition": "by:label"}, OptionError, "3 clients too"),
        ({"partition": "by:user"}, DataError, "Choose one of label"),
    ],
)
def test_clients_that_cannot_be(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        write(arrays(), tmp_path / "data", **options)
    assert list(tmp_path.iterdir()) == []


def test_names_that_no_manifest_can_hold_are_refused_before_anything_is_written(tmp_path):
    source = tmp_path / "in"
    for name in (b"a", b"b\xff"):
        folder = os.path.join(os.fsencode(source), name)
        os.makedirs(folder)
        Path(os.fsdecode(folder), "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"must be text of UTF-8, but found .*udcff"):
        write(source, tmp_path / "data", num_shards=1, split="train=1")
    (source / "t.csv").write_text('day,"sales\nof it",label\n1,two,0\n2,one,1\n')
    with pytest.raises(DataError, match=r"letters that can be shown, but found 'sales\\nof it'"):
        write(source / "t.csv", tmp_path / "data", num_shards=1, split="train=1")
    assert list(tmp_path.iterdir()) == [source]


def test_skew_needs_class_ids(tmp_path):
    images, _ = arrays()
    with pytest.raises(DataError, match="class ids"):
        write((images, np.zeros(50)), tmp_path / "data", clients=3, partition="dirichlet:1")
