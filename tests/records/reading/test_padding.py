"""Features of variable length, written as they are and read at one length."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records import check, load_manifest, read, write
from tfdist.records.format.readings import with_readings
from tfdist.records.reading.opening import open_source
from tfdist.records.reading.reader import explain_read_error

DTYPES = ["int64", "float32", "float64", "float16", "uint8", "int32", "bool"]
LENGTHS = [2, 0, 5, 1]


def _ragged(dtype, inner=()):
    random = np.random.default_rng(0)
    return [random.integers(0, 2 if dtype == "bool" else 100, (n, *inner)).astype(dtype)
            for n in LENGTHS]  # fmt: skip


def _filled(parts, length, fill=0):
    inner = parts[0].shape[1:]
    whole = np.full((len(parts), length, *inner), fill, parts[0].dtype)
    for row, part in enumerate(parts):
        whole[row, : len(part)] = part[:length]
    return whole


def _change(folder, **readings):
    manifest = load_manifest(folder)
    replace(manifest, schema=with_readings(manifest.schema, **readings)).save(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards with a ragged feature of every dtype, one of pairs, and text; "id" tells records."""
    out = tmp_path_factory.mktemp("ragged") / "data"
    inputs = {dtype: _ragged(dtype) for dtype in DTYPES}
    inputs |= {"pairs": _ragged("float32", (2,)), "halves": _ragged("float16", (3,))}
    inputs |= {"text": ["a", "bé", "", "d" * 300], "words": [["a", "b"], [], ["c"], ["d"] * 5]}
    inputs |= {"two": [["a", "b"]] * 4, "id": np.arange(4)}
    write((inputs, np.array([-1.5, 2.5, 0, 1], np.float32)), out, split="train=1", num_shards=2)
    assert check(out) == []
    return out


def _read(folder):
    x, _ = next(iter(read(folder, batch_size=4)))
    order = np.argsort(x["id"].numpy())
    return {name: values.numpy()[order] for name, values in x.items()}


def test_all_dtypes_come_back_filled_up(folder):
    x = _read(folder)
    for dtype in DTYPES:
        assert x[dtype].dtype == dtype
        np.testing.assert_array_equal(x[dtype], _filled(_ragged(dtype), 5))
    np.testing.assert_array_equal(x["pairs"], _filled(_ragged("float32", (2,)), 5))
    np.testing.assert_array_equal(x["halves"], _filled(_ragged("float16", (3,)), 5))
    assert x["text"].tolist() == [b"a", "bé".encode(), b"", b"d" * 300]
    assert x["words"].tolist()[:2] == [[b"a", b"b", b"", b"", b""], [b""] * 5]
    assert x["two"].tolist() == [[b"a", b"b"]] * 4


def test_specs_are_of_one_length(folder):
    spec = read(folder, batch_size=3).element_spec[0]
    assert (spec["pairs"].shape[1:], spec["text"].dtype) == ((5, 2), tf.string)


@pytest.mark.parametrize("length", [3, 8])
def test_another_length_without_writing_anew(folder, tmp_path, length):
    again = shutil.copytree(folder, tmp_path / "again")
    _change(again, max_length=length)
    x = _read(again)
    for dtype in DTYPES:
        np.testing.assert_array_equal(x[dtype], _filled(_ragged(dtype), length))
    assert check(again) == []


def test_filled_with_a_number_of_ones_own(folder, tmp_path):
    again = shutil.copytree(folder, tmp_path / "again")
    manifest = load_manifest(again)
    features = [
        replace(item, reading=replace(item.reading, fill=1)) if item.is_ragged else item
        for item in manifest.schema.features
    ]
    replace(manifest, schema=type(manifest.schema)(tuple(features))).save(again)
    x = _read(again)
    for dtype in DTYPES:
        np.testing.assert_array_equal(x[dtype], _filled(_ragged(dtype), 5, 1))
    np.testing.assert_array_equal(x["halves"], _filled(_ragged("float16", (3,)), 5, 1))


def test_a_record_of_half_an_entry_is_refused(folder, tmp_path):
    again = shutil.copytree(folder, tmp_path / "again")
    text = (again / "manifest.json").read_text()
    value = json.loads(text)
    value.pop("checksum")
    pairs = next(item for item in value["schema"] if item["name"] == "pairs")
    pairs["shape"] = [None, 3]
    (again / "manifest.json").write_text(json.dumps(value))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(read(again, batch_size=4, cache=False))
    explained = explain_read_error(caught.value, again)
    assert isinstance(explained, DataError)
    assert "'pairs' must have 3 values for each entry" in str(explained)


def test_the_manifest_says_what_older_versions_cannot_read(folder, tmp_path):
    assert json.loads((folder / "manifest.json").read_text())["format_version"] == 2
    write((np.zeros((4, 2)), np.zeros(4)), tmp_path / "plain", split="train=1", num_shards=1)
    assert json.loads((tmp_path / "plain" / "manifest.json").read_text())["format_version"] == 1


def test_text_of_small_shards_is_kept_in_memory(folder):
    numbers = sum(np.dtype(d).itemsize * 5 for d in DTYPES) + 5 * 2 * 4 + 5 * 3 * 2 + 8 + 4
    stored = -(-load_manifest(folder).splits["train"].bytes // 4)
    # One string, five and two of them, 24 bytes each.
    assert open_source(folder).record_bytes == numbers + 8 * 24 + stored
    kept, streamed = (
        [x for x, _ in read(folder, batch_size=3, cache=cache)] for cache in (True, False)
    )
    for one, other in zip(kept, streamed, strict=True):
        assert all((one[name].numpy() == other[name].numpy()).all() for name in one)
