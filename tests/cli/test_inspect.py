"""tfdist inspect: the tables, and the faults."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.records import load_manifest, write

SHARD = "train-00001-of-00002.tfrecord"


@pytest.fixture
def data(tmp_path):
    (tmp_path / "t.csv").write_text(
        "a,kind\n" + "".join(f"{n},{'[red]' if n % 4 else 'blue'}\n" for n in range(40))
    )
    write(tmp_path / "t.csv", tmp_path / "data", num_shards=2, stratify=True)
    return tmp_path / "data"


def test_tables(tfdist, data):
    code, out, err = tfdist("inspect", "data")
    assert (code, err) == (0, "")
    assert "from csv, seed 0, stratified, compression none" in out
    for text in ("features", "float32", "[red]", "blue", "25 (75.8%)", SHARD):
        assert text in out
    for split in load_manifest(data).splits.values():
        for shard in split.shards:
            assert shard.checksum in out
    assert "clean" not in out


def test_clean(tfdist, data):
    code, out, _ = tfdist("inspect", "data", "--check")
    assert code == 0
    assert "clean: every byte of 4 shards is as it was written" in out


def test_faults_are_named_and_exit_with_1(tfdist, data):
    path = data / SHARD
    size = load_manifest(data).layout.record_bytes + 16
    content = bytearray(path.read_bytes())
    content[2 * size + 15] ^= 8
    path.write_bytes(bytes(content))
    (data / "foreign.tfrecord").write_bytes(b"")
    code, out, err = tfdist("inspect", "data", "--check")
    assert (code, err) == (1, "")
    assert f"fault: {SHARD}, record 2, byte {2 * size}: the data" in out
    assert "fault: foreign.tfrecord: " in out
    assert out.rstrip().endswith("2 faults")
    assert tfdist("inspect", "data")[0] == 0


def test_a_split_that_is_a_folder_of_files_that_others_wrote(tfdist, data, tmp_path):
    for split in ("train", "validation"):
        (tmp_path / "logs" / split).mkdir(parents=True)
        for shard in data.glob(f"{split}-*.tfrecord"):
            shard.rename(tmp_path / "logs" / split / shard.name)
    assert tfdist("adopt", "logs")[0] == 0
    code, out, _ = tfdist("inspect", "logs/train", "--check")
    assert code == 0
    assert "clean: every byte of 2 shards" in out
    assert "validation-" not in out


def test_many_classes_are_cut(tfdist, tmp_path):
    write((np.zeros(60), np.arange(60)), tmp_path / "data", split="train=1")
    _, out, _ = tfdist("inspect", "data")
    assert "and 40 more" in out


def test_no_shards(tfdist):
    code, out, err = tfdist("inspect", ".")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "tfdist shard SOURCE" in err


@pytest.fixture
def fed(tmp_path):
    write("digits", tmp_path / "fed", clients=30, partition="shards:2")
    return tmp_path / "fed"


def test_clients_and_their_skew(tfdist, fed):
    code, out, err = tfdist("inspect", "fed", "--check", "--plot", "skew.png")
    assert (code, err) == (0, "")
    assert "30 clients, 1,498 records, shards:2" in out
    for text in ("label skew", "client-19", "and 10 more", "validation-00003-of-00004"):
        assert text in out
    assert "client-20" not in out
    assert "train-00025-of-00030" not in out
    assert "plot: skew.png" in out
    assert "clean: every byte of 34 shards" in out
    assert (fed.parent / "skew.png").read_bytes().startswith(b"\x89PNG")


def test_a_fault_of_a_client(tfdist, fed):
    path = fed / "train-00025-of-00030.tfrecord"
    path.write_bytes(path.read_bytes()[:-1])
    code, out, _ = tfdist("inspect", "fed", "--check")
    assert code == 1
    assert "fault: train-00025-of-00030.tfrecord, record" in out


def test_a_folder_of_shards_for_each_client(tfdist, tmp_path):
    for number, name in enumerate(("amy", "bob")):
        write((np.zeros((20, 2)), np.arange(20) % 3 + number), tmp_path / "sets" / name)
    code, out, err = tfdist("inspect", "sets", "--check", "--plot", "skew.png")
    assert (code, err) == (0, "")
    for text in ("train: 2 clients, 34 records", "validation: 2 clients", "amy", "14 shards"):
        assert text in out
    (tmp_path / "sets" / "eve").mkdir()
    next((tmp_path / "sets" / "bob").glob("train*")).unlink()
    code, out, _ = tfdist("inspect", "sets", "--check")
    assert code == 1
    assert "train: clients that cannot be read" in out
    assert "fault: bob/train-00000-of-00004.tfrecord: this shard of the manifest is missing" in out
    assert "fault: eve: " in out


def test_a_folder_that_is_not_there_beside_others(tfdist, data):
    for options in ((), ("--check",)):
        code, out, err = tfdist("inspect", "dota", *options)
        assert (code, out) == (2, "")
        assert "no folder dota" in err


def test_a_plot_needs_clients(tfdist, data):
    code, _, err = tfdist("inspect", "data", "--plot", "skew.png")
    assert code == 2
    assert "--clients N" in err


class TestOneSplit:
    def test_is_shown_alone(self, tfdist, data):
        code, out, err = tfdist("inspect", "data/validation", "--check")
        assert (code, err) == (0, "")
        assert "validation-00000-of" in out
        assert "train" not in out
        assert "clean: every byte of 2 shards is as it was written" in out

    def test_has_its_own_faults(self, tfdist, data):
        (data / SHARD).unlink()
        assert tfdist("inspect", "data/validation/", "--check")[0] == 0
        code, out, _ = tfdist("inspect", "data/train", "--check")
        assert (code, out.count("fault: ")) == (1, 1)

    def test_must_be_there(self, tfdist, data):
        code, out, err = tfdist("inspect", "data/test")
        assert (code, out) == (2, "")
        assert "must be one of train, validation in data, but found 'test'" in err

    def test_of_clients(self, tfdist, tmp_path):
        for name in ("amy", "bob"):
            write((np.zeros((20, 2)), np.arange(20) % 3), tmp_path / "sets" / name)
        code, out, err = tfdist("inspect", "sets/validation", "--check")
        assert (code, err) == (0, "")
        assert "validation: 2 clients" in out
        assert "train" not in out


def test_what_is_no_shards_is_never_offered_as_their_folder(tfdist, data, tmp_path):
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for raw in ("photos", "t.csv"):
        for verb in (
            ["inspect", raw],
            ["train", "--model", "m.py:model_fn", "--output", "o", "--data", raw],
        ):
            (tmp_path / "m.py").write_text("def model_fn(): ...")
            code, out, err = tfdist(*verb)
            assert (code, out) == (2, "")
            assert f"`tfdist shard {raw} NEW_FOLDER`" in err
    assert "`tfdist shard SOURCE empty`" in tfdist("inspect", "empty")[2]
    (data / "manifest.json").unlink()
    assert "`tfdist shard SOURCE NEW_FOLDER`" in tfdist("inspect", "data")[2]
