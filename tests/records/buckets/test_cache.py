"""Shards in a bucket: real requests to servers of S3 and of Google's storage on this machine."""

from __future__ import annotations

import errno
import fcntl
import functools
import http.server
import json
import logging
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from tfdist.errors import DataError, EngineMissingError, OptionError, WriteError
from tfdist.records import adopt, check, load_manifest, open_records, write
from tfdist.records.buckets import cache
from tfdist.records.buckets.store import Store
from tfdist.records.reading.vocabulary import _first_split

BUCKET = "s3://bucket"


@pytest.fixture(autouse=True)
def folder(emptied_bucket, tmp_path, monkeypatch):
    """The folder of the cache, empty; and an empty bucket."""
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    yield tmp_path / "cache"
    for descriptor in cache._used.values():
        os.close(descriptor)
    cache._used.clear()


@pytest.fixture(params=["s3", "gs"])
def bucket(request):
    """The URL of an empty bucket."""
    if request.param == "gs":
        request.getfixturevalue("gcs_server")
        files = Store("gs://bucket")
        for name in files.sizes():
            files.remove(name)
    return f"{request.param}://bucket"


def arrays(seed=0, num_records=40):
    x = np.random.default_rng(seed).normal(size=(num_records, 3)).astype(np.float32)
    return x, np.arange(num_records) % 4


def put(name="data", seed=0, bucket=BUCKET):
    write(arrays(seed), f"{bucket}/{name}", split="train=4,validation=1", num_shards=2)
    return f"{bucket}/{name}"


def rows(source):
    batches = open_records(source).batches(0, 32, 8, shuffle=False, seed=0, epoch=0)
    return np.concatenate([x.numpy() for x, _ in batches])


def fetched(folder):
    return sorted(path.name for path in folder.glob("*/*") if path.is_file())


def test_written_there_and_read_from_there(bucket, tmp_path, folder):
    write(arrays(), tmp_path / "data", split="train=4,validation=1", num_shards=2)
    url = put(bucket=bucket)
    np.testing.assert_array_equal(rows(f"{url}/train"), rows(tmp_path / "data" / "train"))
    # One split alone is fetched, and nothing is left of the writing.
    names = ["manifest.json", "train-00000-of-00002.tfrecord", "train-00001-of-00002.tfrecord"]
    assert fetched(folder) == names
    assert check(url) == []
    assert len(fetched(folder)) == 5
    assert load_manifest(url) == load_manifest(tmp_path / "data")


def test_fetched_once(folder):
    url = put()
    rows(f"{url}/train")
    before = {path: path.stat().st_ino for path in folder.glob("*/*.tfrecord")}
    rows(f"{url}/train")
    assert {path: path.stat().st_ino for path in folder.glob("*/*.tfrecord")} == before


def test_what_was_written_anew_is_fetched_anew(s3_server):
    url = put()
    old = rows(f"{url}/train")
    for item in s3_server.list_objects_v2(Bucket="bucket")["Contents"]:
        s3_server.delete_object(Bucket="bucket", Key=item["Key"])
    put(seed=1)  # Files of the same names and sizes.
    assert not np.array_equal(rows(f"{url}/train"), old)


def test_where_records_begin_is_fetched_too(s3_server, folder):
    """Records of one layout need no such file; without it in the bucket they are read as well."""
    put()
    rows(f"{BUCKET}/data/train")
    assert "manifest.offsets" not in fetched(folder)
    texts = np.array([f"{'long ' * (n % 5)}text {n}" for n in range(40)])
    write((texts, np.arange(40) % 2), f"{BUCKET}/texts", split="train=1", num_shards=2)
    rows(f"{BUCKET}/texts/train")
    (copy,) = folder.glob("*/manifest.offsets")
    key = "texts/manifest.offsets"
    whole = s3_server.get_object(Bucket="bucket", Key=key)["Body"].read()
    assert copy.read_bytes() == whole
    copy.unlink()
    s3_server.delete_object(Bucket="bucket", Key=key)
    rows(f"{BUCKET}/texts/train")
    assert not copy.exists()


def test_a_file_that_was_cut_here_is_fetched_again(folder):
    url = put()
    whole = rows(f"{url}/train")
    shard = next(folder.glob("*/train-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    np.testing.assert_array_equal(rows(f"{url}/train"), whole)


def test_a_damaged_object_is_named_and_not_kept(s3_server, folder):
    url = put()
    key = "data/train-00001-of-00002.tfrecord"
    data = bytearray(s3_server.get_object(Bucket="bucket", Key=key)["Body"].read())
    data[20] ^= 1
    s3_server.put_object(Bucket="bucket", Key=key, Body=bytes(data))
    with pytest.raises(DataError, match=f"{BUCKET}/{key} must be as it was written"):
        open_records(f"{url}/train")
    assert "train-00001-of-00002.tfrecord" not in fetched(folder)
    assert not [name for name in fetched(folder) if name.startswith(".")]


def test_a_missing_object_is_named(s3_server):
    url = put()
    s3_server.delete_object(Bucket="bucket", Key="data/train-00000-of-00002.tfrecord")
    with pytest.raises(DataError, match=r"data/train-00000-of-00002.tfrecord must be an object"):
        open_records(f"{url}/train")


def test_what_is_no_folder_of_shards():
    with pytest.raises(DataError, match="s3://bucket/nothing must be a folder of shards"):
        open_records(f"{BUCKET}/nothing")


def test_no_connection_is_one_line_that_names_the_object(bucket, monkeypatch, capfd):
    url = put(bucket=bucket)
    for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr(
        "tfdist.records.buckets.store._OF_S3",
        {"config_kwargs": {"retries": {"total_max_attempts": 1}}},
    )
    if bucket == "gs://bucket":
        import gcsfs

        gcsfs.GCSFileSystem.clear_instance_cache()
        monkeypatch.setattr("gcsfs.retry.is_retriable", lambda _: False)
        # As in a program that listens to no log.
        monkeypatch.setattr(logging.getLogger("gcsfs"), "propagate", False)
    with pytest.raises(DataError, match=r"data/manifest.json must be within reach") as caught:
        load_manifest(url)
    assert str(caught.value).startswith(f"{bucket}/data/manifest.json")
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err


def test_without_its_package_a_url_is_refused_with_what_to_install(monkeypatch):
    from fsspec.registry import _registry  # Of what was imported before.

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(_registry, "gs", raising=False)
    with pytest.raises(EngineMissingError, match=r"gs:// URLs.*Run pip install .* gcsfs\.$"):
        load_manifest("gs://bucket/data")


def test_a_place_that_is_taken_is_left_as_it_is(bucket):
    put(bucket=bucket)
    before = Store(f"{bucket}/data").sizes()
    with pytest.raises(DataError, match=rf"free, but found {bucket}/data, where manifest.json"):
        put(seed=1, bucket=bucket)
    assert Store(f"{bucket}/data").sizes() == before


@pytest.mark.parametrize("url", ["https://host/data", "hf://datasets/who/data"])
def test_what_is_only_read_is_refused_before_anything_is_written(url):
    with pytest.raises(OptionError, match=f"begins with s3:// or gs://, but found {url}"):
        write(arrays(), url)


@pytest.mark.parametrize("option", ["resume", "overwrite"])
def test_what_nothing_is_kept_of_cannot_be_gone_on_with(option, folder):
    """What is written to a bucket lies in the cache until it is complete, and goes with its run."""
    with pytest.raises(
        OptionError, match=r"a folder on this machine.*found s3://bucket/data\..*copy"
    ):
        write(arrays(), f"{BUCKET}/data", **{option: True})
    assert Store(BUCKET).sizes() == {}
    assert not folder.exists()


def test_a_source_in_a_bucket(bucket, tmp_path, folder):
    files = Store(bucket)
    for number in range(6):
        path = tmp_path / "image.png"
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
        files.write(f"photos/{'ab'[number % 2]}/{number}.png", path.read_bytes())
    files.write("table.csv", b"a,label\n1,0\n2,1\n3,0\n4,1\n")
    manifest = write(f"{bucket}/photos", tmp_path / "photos", split="train=1", num_shards=1)
    assert manifest.splits["train"].class_counts == {0: 3, 1: 3}
    manifest = write(f"{bucket}/table.csv", tmp_path / "table", split="train=1", num_shards=1)
    assert manifest.splits["train"].records == 4
    assert fetched(folder) == []
    with pytest.raises(DataError, match=rf"{bucket}/none.csv must be a folder or an object"):
        write(f"{bucket}/none.csv", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("are_here", [True, False], ids=["photos here", "photos there"])
def test_labels_and_masks_in_a_bucket(bucket, tmp_path, folder, are_here):
    files, photos = Store(bucket), tmp_path / "photos"
    photos.mkdir()
    for number in range(6):
        path = photos / f"{number}.png"
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
        files.write(f"photos/{path.name}", path.read_bytes())
        Image.new("L", (4, 4), number).save(tmp_path / "mask.png")
        files.write(f"masks/{path.name}", (tmp_path / "mask.png").read_bytes())
    rows = [f"{number}.png,{'ab'[number % 2]}" for number in range(6)]
    files.write("labels.csv", "\n".join(["file,label", *rows]).encode())
    files.write("none.csv", b"file,label\n")
    source, whole = photos if are_here else f"{bucket}/photos", {"split": "train=1"}
    manifest = write(source, tmp_path / "out", labels=f"{bucket}/labels.csv", **whole)
    assert manifest.splits["train"].class_counts == {0: 3, 1: 3}
    masked = write(source, tmp_path / "masked", masks=f"{bucket}/masks", **whole)
    assert masked.splits["train"].records == 6
    assert fetched(folder) == []
    with pytest.raises(DataError, match=re.escape(f"{bucket}/none.csv")) as caught:
        write(source, tmp_path / "none", labels=f"{bucket}/none.csv", **whole)
    assert "scratch" not in str(caught.value)
    if not are_here:
        for name in files.sizes():
            if name.startswith("masks/"):
                files.write(f"photos/{name}", files.read(name))
        within = write(source, tmp_path / "within", masks=f"{source}/masks", **whole)
        assert within.splits["train"].records == 6


def test_a_source_in_a_bucket_is_gone_on_with_while_it_is_the_same(s3_server, tmp_path, folder):
    table = "a,note,label\n" + "".join(f"{n},word {n},{n % 3}\n" for n in range(80))
    source, out = f"{BUCKET}/table.csv", tmp_path / "out"
    options = {"split": "train=1", "num_shards": 4}

    def end(done, _total):
        if done > 40:
            raise KeyboardInterrupt

    def stored(text):
        s3_server.put_object(Bucket="bucket", Key="table.csv", Body=text.encode())

    stored(table)
    write(source, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        write(source, out, **options, progress=end)
    kept = tmp_path / "out.unfinished" / "shards" / "train-00000-of-00004.tfrecord"
    before = kept.stat().st_ino
    stored(table.replace("word 7,", "word 9,"))
    with pytest.raises(DataError, match="as it was when the run began"):
        write(source, out, **options, resume=True)
    stored(table)
    write(source, out, **options, resume=True)
    assert (out / kept.name).stat().st_ino == before
    for path in (tmp_path / "whole").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert [path for path in folder.iterdir() if path.name.startswith(".scratch")] == []


def test_files_of_others_are_adopted_there(s3_server, tmp_path, folder):
    write(arrays(), tmp_path / "data", split="train=4,validation=1", num_shards=2)
    local = rows(tmp_path / "data" / "train")
    for path in (tmp_path / "data").glob("*.tfrecord"):
        split = path.name.split("-")[0]
        s3_server.upload_file(str(path), "bucket", f"raw/{split}/{path.name}")
    said: list[str] = []
    manifest = adopt(f"{BUCKET}/raw", inputs="x", labels="label", tell=said.append)
    assert fetched(folder) == []
    assert load_manifest(f"{BUCKET}/raw") == manifest
    np.testing.assert_array_equal(rows(f"{BUCKET}/raw/train"), local)
    before = Store(f"{BUCKET}/raw").read("manifest.json")
    adopt(f"{BUCKET}/raw", tell=said.append)
    assert said[-1].startswith("s3://bucket/raw has a manifest of tfdist already")
    assert Store(f"{BUCKET}/raw").read("manifest.json") == before
    with pytest.raises(DataError, match="s3://bucket/raw must have the feature 'z'") as caught:
        adopt(f"{BUCKET}/raw", inputs="z")
    assert "scratch" not in str(caught.value)
    with pytest.raises(DataError, match="adopted as one folder"):
        adopt(f"{BUCKET}/raw", tmp_path / "out")
    with pytest.raises(DataError, match="s3://bucket/none must be a folder or an object"):
        adopt(f"{BUCKET}/none")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "..", ".", "", "a//b"])
def test_a_manifest_that_names_files_elsewhere_has_none_fetched(name):
    shard = {"file": name, "bytes": 1, "checksum": "0"}
    text = json.dumps({"splits": {"train": {"shards": [shard]}}})
    assert cache._files_of(text.encode(), None) == {}


def test_what_cannot_be_written_here_is_no_matter_of_the_network(s3_server, tmp_path, monkeypatch):
    url = put()
    with pytest.raises(WriteError, match=f"{tmp_path / 'none'} must be written whole"):
        Store(url).fetch("manifest.json", tmp_path / "none" / "file", lambda _: None)
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(OptionError, match=r"Not a directory.*Name one with .*TFDIST_CACHE"):
        open_records(f"{url}/train")


def test_the_first_split_of_a_folder_there(s3_server):
    url = put()
    assert _first_split(url) == cache.local_shards(url) / "train"
    assert _first_split(f"{url}/validation") == f"{url}/validation"


def test_a_file_system_without_locks(s3_server, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no locks")

    url = put()
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert len(rows(f"{url}/train")) == 32


def test_the_bound(folder, monkeypatch):
    url = put()
    monkeypatch.setenv(cache.BOUND_VARIABLE, "1e-7")
    with pytest.raises(DataError, match=r"cache of 1e-07 GB.*TFDIST_CACHE_GB"):
        open_records(url + "/train")
    monkeypatch.setenv(cache.BOUND_VARIABLE, "much")
    with pytest.raises(OptionError, match="must be a number of GB"):
        open_records(url + "/train")


def test_what_was_used_longest_ago_goes_first_but_never_what_is_in_use(folder, monkeypatch):
    urls = [put(name) for name in ("one", "two", "three")]
    program = "import sys; from tfdist.records.buckets.cache import local_shards\n"
    program += "print(local_shards(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for url in urls[:2]:  # In a process that has ended: nobody uses them.
        subprocess.run([sys.executable, "-c", program, url], check=True, env=environment)
    size = sum(path.stat().st_size for path in folder.glob("bucket-one-*/*"))
    monkeypatch.setenv(cache.BOUND_VARIABLE, str(2.5 * size / 1e9))
    cache.local_shards(urls[2])
    assert sorted(path.name.split("-")[1] for path in folder.iterdir() if path.is_dir()) == [
        "three",
        "two",
    ]
    monkeypatch.setenv(cache.BOUND_VARIABLE, str(1.5 * size / 1e9))
    with pytest.raises(DataError, match="that are in use"):
        cache.local_shards(urls[0])  # "two" goes, "three" is in use by this process.
    assert list(folder.glob("bucket-three-*/*.tfrecord"))


def test_other_folders_beside_the_cache_are_left_alone(folder, monkeypatch):
    """A user may name a folder of their own for the cache."""
    names = ("photos", "photos-0123456789ab", "runs", ".scratch-notes")
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "only.jpg").write_bytes(bytes(10_000))
    url = put()
    monkeypatch.setenv(cache.BOUND_VARIABLE, "6e-6")
    rows(f"{url}/train")
    assert [(folder / name / "only.jpg").stat().st_size for name in names] == [10_000] * 4


def test_what_is_written_anew_leaves_a_running_reader_its_own(s3_server, folder):
    url = put()
    old, reading = rows(f"{url}/train"), open_records(f"{url}/train", cache=False)
    for item in s3_server.list_objects_v2(Bucket="bucket")["Contents"]:
        s3_server.delete_object(Bucket="bucket", Key=item["Key"])
    put(seed=1)
    open_records(f"{url}/validation")  # Another split first.
    new = rows(f"{url}/train")
    assert not np.array_equal(new, old)
    np.testing.assert_array_equal(rows(url_of_copy(reading)), old)
    assert check(url) == []
    # Once no process uses the shards of before, they go.
    for descriptor in cache._used.values():
        os.close(descriptor)
    cache._used.clear()
    cache.local_shards(url)
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1


def url_of_copy(records):
    copy, split, *_ = records.place
    return f"{copy}/{split}"


def test_pages_of_https_tell_no_sizes(tmp_path):
    served = tmp_path / "served"
    (served / "arrays").mkdir(parents=True)
    (served / "table.csv").write_text("a,label\n1,0\n2,1\n3,0\n4,1\n")
    np.savez(served / "arrays" / "data.npz", x=np.ones((6, 2), np.float32), y=np.arange(6) % 2)
    handler = functools.partial(_Silent, directory=served)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        try:
            for source, records in ((f"{base}/table.csv", 4), (f"{base}/arrays/data.npz", 6)):
                out = tmp_path / f"out-{records}"
                manifest = write(source, out, split="train=1", num_shards=1)
                assert manifest.splits["train"].records == records
            write((np.ones((8, 2), np.float32), np.arange(8)), served / "shards", num_shards=1)
            assert check(f"{base}/shards") == []
        finally:
            server.shutdown()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass
