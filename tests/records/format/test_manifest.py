"""manifest.json: saved, loaded, and refused when it is not one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tfdist.errors import DataError
from tfdist.records import load_manifest, write
from tfdist.records.format.manifest import is_split_beside


@pytest.fixture
def folder(tmp_path):
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    write((x, np.arange(20) % 3), tmp_path / "data", num_shards=2)
    return tmp_path / "data"


def change(folder, edit):
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    del value["checksum"]
    edit(value)
    path.write_text(json.dumps(value))


def test_what_was_written_is_loaded(folder, tmp_path):
    manifest = load_manifest(folder)
    other = tmp_path / "other"
    other.mkdir()
    manifest.save(other)
    assert load_manifest(other) == manifest
    assert manifest.written_by.startswith("tfdist ")
    assert manifest.splits["train"].records == 17
    assert sum(manifest.splits["train"].class_counts.values()) == 17
    assert [feature.name for feature in manifest.schema.features] == ["x", "label"]


def test_no_folder_and_no_manifest(tmp_path):
    with pytest.raises(DataError, match="no folder"):
        load_manifest(tmp_path / "nowhere")
    with pytest.raises(DataError, match="tfdist shard"):
        load_manifest(tmp_path)


def test_not_json(folder):
    (folder / "manifest.json").write_text('{"format')
    with pytest.raises(DataError, match="must be JSON"):
        load_manifest(folder)


def test_class_ids_of_64_bits(tmp_path):
    labels = np.array([2**63 - 1, 2**53 + 1])
    write((np.zeros(2), labels), tmp_path / "data", split="train=1", num_shards=1)
    counts = load_manifest(tmp_path / "data").splits["train"].class_counts
    assert counts == {2**53 + 1: 1, 2**63 - 1: 1}


def _drop(key):
    return lambda value: value.pop(key)


def _set(*path_and_new):
    *path, last, new = path_and_new

    def edit(value):
        for key in path:
            value = value[key]
        value[last] = new

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set("format_version", 99), "format version 1"),
        (_drop("format_version"), "format_version"),
        (_drop("splits"), "splits"),
        (_set("splits", {}), "at least one split"),
        (_set("splits", "train", "shards", []), "at least one shard"),
        (_set("splits", "train", "records", 3), "sum over its shards"),
        (_set("splits", "train", "class_counts", [1]), "class counts"),
        (_set("splits", "train", "class_counts", {str(2**63): 4}), "class counts"),
        (_set("splits", "train", "shards", 0, "file", "../x"), "without a folder"),
        (_set("splits", "train", "shards", 0, "records", 0), "'records' must be at least 1"),
        (_set("splits", "train", "shards", 0, "bytes", "9"), "'bytes' must be of type int"),
        (_set("splits", "train", "shards", 0, "checksum", "xyz"), "8 hexadecimal digits"),
        (_set("compression", "zip"), "compression must be one of"),
        (_set("schema", []), "at least one input"),
        (_set("schema", 0, "dtype", "complex64"), "dtype of feature 'x'"),
        (_set("schema", 0, "shape", [0]), "shape of feature 'x'"),
        (_set("schema", 0, "name", "label"), "a name of its own"),
        (_set("schema", 1, "classes", [1]), "classes of feature 'label'"),
        (_set("layout", "record_bytes", 5), "inside the record"),
        (_set("layout", "slots", {}), "one slot for each feature"),
        (_set("layout", "slots", "x", "bytes", 4), "slot of 'x' must hold shape"),
        (_set("layout", "slots", "x", "kind", "zip"), "raw, float or varint"),
        (_set("splits", "train", "shards", 0, "client", "amy"), "must have a client, or none"),
        (_set("splits", "train", "shards", 0, "client", ""), "must have a name"),
        (_set("splits", "train", "shards", 0, "client", 7), "'client' must be of type str"),
        (_set("splits", "train", "shards", 0, "class_counts", [1]), "class counts of train-00000"),
        (_set("splits", "train", "partition", 3), "'partition' must be of type str"),
        (_set("left_out", {"bad row": 0}), "'left_out' must map reasons"),
        (_set("left_out", [3]), "'left_out' must map reasons"),
    ],
)
def test_a_manifest_that_is_not_one_names_the_rule(folder, edit, message):
    change(folder, edit)
    with pytest.raises(DataError, match=message) as raised:
        load_manifest(folder)
    assert "manifest.json" in str(raised.value)


def test_without_clients_a_manifest_is_what_it_was_before_there_were_any(folder):
    value = json.loads((folder / "manifest.json").read_text())
    assert set(value["splits"]["train"]) == {"records", "class_counts", "shards"}
    shard = value["splits"]["train"]["shards"][0]
    assert set(shard) == {"file", "records", "bytes", "checksum"}
    assert not load_manifest(folder).splits["train"].has_clients


def test_the_shards_of_a_client_need_not_lie_side_by_side(folder):
    def own(value):
        train = value["splits"]["train"]
        train["shards"] += value["splits"].pop("validation")["shards"]
        train["records"] = 20
        for client, shard in zip("abab", train["shards"], strict=True):
            shard["client"] = client

    change(folder, own)
    shards = load_manifest(folder).splits["train"].clients
    assert {client: len(own) for client, own in shards.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize("text", ['{"name": "an app"}', "no json", "[" * 100_000])
def test_a_manifest_of_another_program_divides_nothing(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    (tmp_path / "train").mkdir()
    assert not is_split_beside(tmp_path / "train")
