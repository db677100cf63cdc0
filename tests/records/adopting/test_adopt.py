"""Files of others become shards: what is taken, what is refused, and that nothing is rewritten."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from records_of_others import example, image, imagenet, sequence_example, tfds, write

import tfdist
from tfdist.cli import voice
from tfdist.errors import CorruptShardError, DataError, OptionError, TfdistError
from tfdist.records import adopt, check, load_manifest, read
from tfdist.records.adopting.choose import UnclearError
from tfdist.records.format.offsets import write_offsets
from tfdist.runs.training import fingerprint


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def batch(source, size=100):
    return next(iter(read(source, batch_size=size)))


# The layouts of others ------------------------------------------------------------------------


def test_imagenet_of_model_garden(tmp_path):
    folder = imagenet(tmp_path / "imagenet")
    before = contents(folder)
    notes = []
    manifest = adopt(folder, tell=notes.append)
    assert {name: split.records for name, split in manifest.splits.items()} == {
        "train": 6,
        "validation": 2,
    }
    (x,), (y,) = manifest.schema.of_role("input"), manifest.schema.of_role("label")
    assert (x.name, x.shape, x.encoding) == ("image/encoded", (None, None, 3), "jpeg")
    assert (y.name, y.shape, y.dtype) == ("image/class/label", (), "int64")
    assert manifest.splits["train"].class_counts == {1: 2, 2: 2, 3: 2}
    assert any("first_class=1" in note for note in notes)
    # Again, counted from 1: what was taken stays taken.
    notes = []
    again = adopt(folder, first_class=1, tell=notes.append)
    assert [note[:40] for note in notes] == ["the images of 'image/encoded' differ in "]
    assert again.splits["train"].class_counts == {0: 2, 1: 2, 2: 2}
    assert again.schema.class_label.reading.offset == 1
    after = contents(folder)
    assert json.loads(after.pop("manifest.json"))["format_version"] == 2
    index = after.pop("manifest.offsets")
    assert after == before
    (folder / "manifest.offsets").unlink()
    write_offsets(folder, again)  # From the frames of the files.
    assert (folder / "manifest.offsets").read_bytes() == index
    assert check(folder, decode=True) == []
    with pytest.raises(DataError, match="found 1 in 'image/class/label', and first class 2"):
        adopt(folder, first_class=2)
    assert load_manifest(folder) == again


def test_class_ids_that_begin_elsewhere_are_read_from_0(tmp_path):
    records = [example(x=[float(n), 0.5], label=5 + n) for n in range(3)]
    write(tmp_path / "a.tfrecord", records)
    with pytest.raises(DataError, match="in 0 to 2, but found 7"):
        adopt(tmp_path, classes=["a", "b", "c"])
    manifest = adopt(tmp_path, classes=["a", "b", "c"], first_class=5)
    x, y = batch(tmp_path)
    assert y.numpy().tolist() == [0, 1, 2]
    assert x.numpy().tolist() == [[0, 0.5], [1, 0.5], [2, 0.5]]
    assert manifest.schema.class_label.classes == ("a", "b", "c")


def test_a_folder_of_tensorflow_datasets(tmp_path):
    folder = tfds(tmp_path / "tiny")
    manifest = adopt(folder, inputs="grid,packed,objects/bbox")
    assert manifest.schema.class_label.classes == ("a", "b", "c")
    x, y = batch(folder / "train")
    assert (x["grid"].shape, x["grid"].dtype.name) == ((6, 2, 3), "uint8")
    assert x["grid"].numpy()[4].tolist() == [[4, 4, 4], [4, 4, 4]]
    assert (x["packed"].dtype.name, x["packed"].numpy()[3].tolist()) == ("int16", [3, -1])
    # Boxes: none, one and two a record.
    assert x["objects/bbox"].shape == (6, 2, 4)
    assert x["objects/bbox"].numpy().sum(axis=(1, 2)).tolist() == [0, 1, 2, 0, 1, 2]
    assert y.numpy().tolist() == [0, 1, 2, 0, 1, 2]
    # By itself: what the dataset calls its input and its label.
    other = adopt(folder, tmp_path / "other")
    (image_,) = other.schema.of_role("input")
    assert (image_.name, image_.shape, image_.encoding) == ("image", (5, 6, 1), "png")
    assert batch(tmp_path / "other/test")[0].shape == (3, 5, 6, 1)


def test_the_weight_that_a_dataset_names_is_read(tmp_path):
    keys = {"tuple": {"items": [{"featureKey": name} for name in ("x", "y", "importance")]}}
    features = {
        "x": {"tensor": {"shape": {"dimensions": ["2"]}, "dtype": "float32"}},
        "y": {"classLabel": {"numClasses": "2"}},
        "importance": {"tensor": {"shape": {}, "dtype": "float32"}},
    }
    (tmp_path / "features.json").write_text(json.dumps({"featuresDict": {"features": features}}))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"supervisedKeys": keys}))
    records = [example(x=[0.5, 1.0], y=n % 2, importance=n / 2) for n in range(3)]
    write(tmp_path / "tiny-train.tfrecord-00000-of-00001", records)
    notes = []
    adopt(tmp_path, tell=notes.append)
    assert batch(tmp_path)[2].numpy().tolist() == [0, 0.5, 1]
    assert any("and the dataset calls 'importance' the weight)" in note for note in notes)
    adopt(tmp_path, tmp_path / "other", inputs="x", labels="y")
    assert len(batch(tmp_path / "other")) == 2


def test_a_mark_in_front_of_the_names_of_classes_is_none_of_them(tmp_path):
    write(tmp_path / "a.tfrecord", [example(x=[0.5, 1.0], label=n) for n in range(2)])
    (tmp_path / "names.txt").write_text("cat\ndog\n", encoding="utf-8-sig")
    manifest = adopt(tmp_path, classes=tmp_path / "names.txt")
    assert manifest.schema.class_label.classes == ("cat", "dog")


def test_a_dataset_that_says_it_has_more_records_is_not_whole(tmp_path):
    with pytest.raises(CorruptShardError, match="has 3 records, dataset_info"):
        adopt(tfds(tmp_path / "tiny", said=4))


@pytest.mark.parametrize("ending", [".tfrecord", ".tfrecord.gz"])
def test_sequence_examples_also_compressed(tmp_path, ending):
    records = [
        sequence_example(
            {"label": n % 2, "sizes": [n] * n}, {"x": [[float(n), 1.0]] * n, "tokens": [7] * n}
        )
        for n in range(1, 5)
    ]
    write(tmp_path / f"a{ending}", records)
    manifest = adopt(tmp_path, inputs=["x", "tokens", "sizes"], max_length=3)
    value = json.loads((tmp_path / "manifest.json").read_text())
    assert (value["container"], value["compression"]) == (
        "sequence_example",
        "gzip" if ending.endswith("gz") else "none",
    )
    assert load_manifest(tmp_path) == manifest
    x, y = batch(tmp_path)
    assert x["x"].shape == (4, 3, 2)
    assert x["x"].numpy()[1].tolist() == [[2, 1], [2, 1], [0, 0]]
    assert x["tokens"].numpy().tolist() == [[7, 0, 0], [7, 7, 0], [7, 7, 7], [7, 7, 7]]
    assert x["sizes"].numpy().tolist() == [[1, 0, 0], [2, 2, 0], [3, 3, 3], [4, 4, 4]]
    assert y.numpy().tolist() == [1, 0, 1, 0]
    assert check(tmp_path) == []
    # The context alone is an Example.
    adopt(tmp_path, inputs="sizes")
    assert "container" not in json.loads((tmp_path / "manifest.json").read_text())
    assert batch(tmp_path)[0].numpy().tolist()[0] == [1, 0, 0]


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("a", "a")])
def test_a_feature_here_and_a_feature_list_there_are_refused(tmp_path, names):
    lists = [sequence_example({"label": n}, {"x": [1.0, float(n)]}) for n in range(2)]
    features = [example(x=[1.0, float(n)], label=n) for n in range(2)]
    if len({*names}) == 1:
        write(tmp_path / "a.tfrecord", lists + features)
        rule = "a feature and a feature list of one name"
    else:
        for name, records in zip(names, (lists, features), strict=True):
            write(tmp_path / f"{name}.tfrecord", records)
        rule = "a feature in all files, or a feature list in all, but found one in b.tfrecord"
    with pytest.raises(DataError, match=rule):
        adopt(tmp_path, inputs="x")


# What the features are ------------------------------------------------------------------------


def test_kinds_of_features(tmp_path):
    records = [
        example(
            text="ä b".encode(),
            tags=[b"t"] * n,
            pair=[n, n],
            ids=[n] * n,
            real=0.5,
            raw=b"\xff\0",
            mixed=[] if n % 2 else 0.5,
            gray=image(4, 4, "PNG", "L" if n % 2 else "RGB"),
            **({} if n == 2 else {"some": float(n)}),
            label=n,
        )
        for n in range(1, 5)
    ]
    write(tmp_path / "a.tfrecord", records)
    notes = []
    names = ["text", "tags", "pair", "ids", "real", "raw", "gray", "some"]
    manifest = adopt(tmp_path, inputs=names, labels="label", tell=notes.append)
    shapes = {f.name: (f.dtype, f.shape, f.longest) for f in manifest.schema.features}
    assert shapes == {
        "text": ("string", (), None),
        "tags": ("string", (None,), 4),
        "pair": ("int64", (2,), None),
        "ids": ("int64", (None,), 4),
        "real": ("float32", (), None),
        "raw": ("string", (), None),
        "gray": ("uint8", (4, 4, 3), None),
        "some": ("float32", (None,), 1),
        "label": ("int64", (), None),
    }
    said = " ".join(notes)
    assert "1 records have no 'some'" in said
    assert "'raw' holds bytes that are no text" in said
    assert "'gray' are read with 3 channels: they are 2 of 1 channels, 2 of 3 channels" in said
    x, _ = batch(tmp_path)
    assert x["some"].numpy().ravel().tolist() == [1, 0, 3, 4]
    assert x["text"].numpy()[0].decode() == "ä b"
    assert x["gray"].shape == (4, 4, 4, 3)
    with pytest.raises(DataError, match="float and int64 lists"):
        adopt(tmp_path, inputs="mixed")
    with pytest.raises(DataError, match="must have the label"):
        adopt(tmp_path, inputs="pair", labels="some")
    with pytest.raises(DataError, match="a sample weight must be one number"):
        adopt(tmp_path, inputs="ids", labels="label", weight="pair")


def test_an_image_that_some_records_lack_is_refused(tmp_path):
    write(tmp_path / "a.tfrecord", [example(im=image(4, 4), label=1), example(label=2)])
    with pytest.raises(DataError, match="no image in 1 records"):
        adopt(tmp_path, inputs="im")
    assert not (tmp_path / "manifest.json").exists()


def test_weights_are_found_and_floats(tmp_path):
    write(tmp_path / "a.tfrecord", [example(x=[0.5, 1.0], y=0, sample_weight=n) for n in (1, 3)])
    adopt(tmp_path)
    weights = batch(tmp_path)[2]
    assert (weights.dtype.name, weights.numpy().tolist()) == ("float32", [1, 3])


@pytest.mark.parametrize("odd", [-0.5, float("nan"), float("inf"), -2])
def test_a_weight_that_is_none_is_refused(tmp_path, odd):
    one = type(odd)(1)
    write(tmp_path / "a.tfrecord", [example(x=[0.5, 1.0], y=0, sample_weight=one)])
    records = [example(x=[0.5, 1.0], y=0, sample_weight=n) for n in (one, odd)]
    write(tmp_path / "b.tfrecord", records)
    with pytest.raises(DataError, match=rf"{odd} in 'sample_weight' of b.tfrecord, record 1"):
        adopt(tmp_path, inputs="x", labels="y")


def test_what_is_not_clear_is_asked_for_with_all_that_there_is(tmp_path):
    write(tmp_path / "a.tfrecord", [example(a=0.5, b=[0.5, 1.0], label=1)])
    with pytest.raises(UnclearError) as raised:
        adopt(tmp_path)
    assert [(item.name, item.shown_shape) for item in raised.value.described] == [
        ("a", "[]"),
        ("b", "[2]"),
        ("label", "[]"),
    ]
    assert str(raised.value).endswith("Say it: inputs='a', labels='label'.")
    with voice.speaking(), pytest.raises(UnclearError, match=r"adopt .* --input a --label label\."):
        adopt(tmp_path)
    damaged = example(a=b"\x89PNG", label=1)
    write(tmp_path / "a.tfrecord", [example(a=image(4, 3, "PNG"), label=1), damaged])
    with pytest.raises(UnclearError, match=r"a \(PNG images, but 1 values that are no JPEG or PNG"):
        adopt(tmp_path)
    with pytest.raises(DataError, match=r"PNG image, the first in a\.tfrecord, record 1\."):
        adopt(tmp_path, inputs="a", labels="label")
    with pytest.raises(DataError, match="Write 'label'"):
        adopt(tmp_path, inputs="a", labels="lable")
    with pytest.raises(DataError, match="one role"):
        adopt(tmp_path, inputs="a", labels="a")


# Where, and again -----------------------------------------------------------------------------


def test_a_manifest_elsewhere_leads_to_the_shards(tmp_path):
    shards = write(
        tmp_path / "theirs/train/a.tfrecord", [example(x=[0.5, 1.0], y=n) for n in (0, 1)]
    )
    adopt(tmp_path / "theirs", tmp_path / "ours")
    assert load_manifest(tmp_path / "ours").shards_in == "../theirs"
    assert [path.name for path in (tmp_path / "theirs").rglob("*") if path.is_file()] == [
        "a.tfrecord"
    ]
    assert batch(tmp_path / "ours/train")[1].numpy().tolist() == [0, 1]
    assert check(tmp_path / "ours") == []
    data = bytearray(shards.read_bytes())
    data[20] ^= 1
    shards.write_bytes(bytes(data))
    (fault,) = check(tmp_path / "ours")
    assert fault.file == "train/a.tfrecord"
    shutil.rmtree(tmp_path / "theirs")
    for reads in (lambda: batch(tmp_path / "ours"), lambda: check(tmp_path / "ours")):
        with pytest.raises(DataError, match="no folder"):
            reads()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    with pytest.raises(DataError, match="new or empty folder"):
        adopt(imagenet(tmp_path / "i"), tmp_path / "full")


def test_how_records_are_read_is_changed_without_touching_them(tmp_path):
    folder = imagenet(tmp_path / "imagenet")
    adopt(folder)
    before = contents(folder)
    prints = [fingerprint(str(folder / "train"))]
    notes = []
    assert adopt(folder, tell=notes.append) == load_manifest(folder)
    assert "already" in notes[0]
    assert contents(folder) == before
    adopt(folder, resize="6x5", fit="crop", color="gray")
    (x,) = load_manifest(folder).schema.of_role("input")
    assert (x.reading.size, x.reading.fit, x.read_shape) == ((6, 5), "crop", (6, 5, 1))
    assert batch(folder / "train")[0].shape == (6, 6, 5, 1)
    prints.append(fingerprint(str(folder / "train")))
    # Adopted anew, it is still read so.
    adopt(folder, first_class=1)
    assert load_manifest(folder).schema.of_role("input")[0].reading == x.reading
    adopt(folder, resize="none", color="none", first_class=None)
    (x,) = load_manifest(folder).schema.of_role("input")
    assert x.read_shape == (None, None, 3)
    after = contents(folder)
    assert {name for name in after if after[name] != before.get(name)} == {"manifest.json"}
    assert len(set(prints)) == 2


def test_other_files_are_not_taken_for_those_of_a_manifest(tmp_path):
    for name, count in (("v1", 1), ("v2", 3)):
        write(tmp_path / name / "train.tfrecord", [example(x=[0.5, 1.0], y=1)] * count)
    adopt(tmp_path / "v1", tmp_path / "ours")
    for options in ({}, {"labels": "y"}):
        assert adopt(tmp_path / "v1", tmp_path / "ours", **options).splits["train"].records == 1
        assert adopt(tmp_path / "v1/train*", tmp_path / "ours", **options).shards_in == "../v1"
        with pytest.raises(DataError, match="must have no manifest yet"):
            adopt(tmp_path / "v2", tmp_path / "ours", **options)
    assert adopt([tmp_path / "ours"], tmp_path / "ours").shards_in == "../v1"
    (tmp_path / "v1/train.tfrecord").rename(tmp_path / "v1/train.data")
    adopt(tmp_path / "v1/*.data", tmp_path / "called otherwise")
    assert adopt(tmp_path / "v1", tmp_path / "called otherwise").shards_in == "../v1"


def test_adopted_with_another_label(tmp_path):
    write(tmp_path / "a.tfrecord", [example(x=[0.5, 1.0], a=n, b=n, c=n - 1) for n in (1, 2)])
    adopt(tmp_path, inputs="x", labels="a", first_class=1)
    adopt(tmp_path, inputs="x", labels="c")
    assert batch(tmp_path)[1].numpy().tolist() == [0, 1]
    adopt(tmp_path, inputs="x,b", labels="a", first_class=1)
    adopt(tmp_path, inputs="x,a", labels="c")
    assert batch(tmp_path)[0]["a"].numpy().tolist() == [1, 2]


def test_shards_of_ones_own_can_only_be_read_otherwise(tmp_path):
    from tfdist.records import write as write_own

    lists = [[1], [1, 2, 3]]
    write_own((lists, np.arange(2)), tmp_path / "own", split="train=1", num_shards=1)
    adopt(tmp_path / "own", max_length=2)
    assert batch(tmp_path / "own")[0].shape == (2, 2)
    adopt(tmp_path / "own", max_length="none")
    assert batch(tmp_path / "own")[0].shape == (2, 3)
    for wrong in ({"max_length": "q"}, {"split": "train=x"}):
        with pytest.raises(OptionError, match=r"max_length must be a whole|split must be a dict"):
            adopt(tmp_path / "own", **wrong)
    with pytest.raises(DataError, match="only how the shards of"):
        adopt(tmp_path / "own", inputs="x")


@pytest.mark.parametrize("text", ['{"name": "an app"}', "no json", '{"format_version": 99}'])
def test_a_manifest_of_another_program_is_never_written_over(tmp_path, text):
    imagenet(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    for source in (tmp_path, f"{tmp_path}/train-*"):
        with pytest.raises(DataError, match="never written over"):
            adopt(source)
    assert (tmp_path / "manifest.json").read_text() == text
    adopt(tmp_path, tmp_path / "out")
    assert (tmp_path / "manifest.json").read_text() == text
    assert load_manifest(tmp_path / "out").shards_in == ".."


def test_adopted_again_the_splits_stay(tmp_path):
    for name in ("p-0", "p-1", "p-2"):
        write(tmp_path / f"theirs/{name}.tfrecord", [example(x=[0.5, 1.0], label=3)])
    patterns = {"train": "p-0*", "test": "p-1*"}
    for out in (tmp_path / "ours", None):
        folder = out or tmp_path / "theirs"
        adopt(tmp_path / "theirs", out, split=patterns)
        notes = []
        again = adopt(tmp_path / "theirs", out, first_class=3, tell=notes.append)
        assert list(again.splits) == ["train", "test"]
        assert load_manifest(folder) == again
        assert "left aside: p-2.tfrecord" in notes[0]
        more = adopt(folder, split=patterns | {"more": "p-2*"})
        assert list(more.splits) == ["train", "test", "more"]
        assert more.schema == again.schema
        assert batch(folder / "more")[1].numpy().tolist() == [0]


# What is refused ------------------------------------------------------------------------------


def test_all_damaged_files_are_named(tmp_path):
    for number in range(23):
        path = write(tmp_path / f"p-{number}.tfrecord", [example(x=[0.5], label=1)])
        if number:
            path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "q.tfrecord").symlink_to(tmp_path / "nowhere")
    write(tmp_path / "r.tfrecord", [b"no example"])
    with pytest.raises(CorruptShardError, match="found 24 that are not") as raised:
        adopt(tmp_path)
    faults = {fault.file: fault.reason for fault in raised.value.faults}
    assert len(faults) == 24
    assert "ends inside this record" in faults["p-1.tfrecord"]
    assert faults["q.tfrecord"] == "is missing"
    assert "no tf.train.Example" in faults["r.tfrecord"]
    assert not (tmp_path / "manifest.json").exists()


def test_zlib_is_told(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(zlib.compress(b"any" * 99))
    with pytest.raises(CorruptShardError, match=r"a\.tfrecord: is compressed with ZLIB"):
        adopt(tmp_path)


def test_files_without_records_are_left_out_and_said(tmp_path):
    write(tmp_path / "a.tfrecord", [example(x=[0.5, 1.0], label=1)])
    write(tmp_path / "b.tfrecord", [])
    (tmp_path / "notes.doc").touch()
    notes = []
    manifest = adopt(tmp_path, tell=notes.append)
    assert [shard.file for shard in manifest.splits["train"].shards] == ["a.tfrecord"]
    assert any("1 file is left out without a record" in note for note in notes)
    assert any("left aside: notes.doc" in note for note in notes)
    write(tmp_path / "c.tfrecord.gz", [example(x=[0.5, 1.0], label=1)])
    with pytest.raises(DataError, match="compressed with gzip, or none"):
        adopt(tmp_path, tmp_path / "out")


def test_gzip_files_that_were_put_together(tmp_path):
    """TensorFlow reads on behind the first part, and so must whoever counts records."""
    for name, numbers in (("a.gz", range(3)), ("b.gz", range(3, 5))):
        write(tmp_path / name, [example(x=float(n), label=n) for n in numbers])
    data = (tmp_path / "a.gz").read_bytes() + (tmp_path / "b.gz").read_bytes()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.tfrecord.gz").write_bytes(data)
    assert adopt(tmp_path / "in").splits["train"].records == 5
    assert batch(tmp_path / "in/train")[1].numpy().tolist() == [0, 1, 2, 3, 4]
    tfdist.records.write(tmp_path / "in", tmp_path / "anew", num_shards=1)
    assert sorted(batch(tmp_path / "anew/train")[1].numpy()) == [0, 1, 2, 3, 4]
    (tmp_path / "in/a.tfrecord.gz").write_bytes(data + b"more")
    with pytest.raises(CorruptShardError, match="the gzip stream is damaged"):
        adopt(tmp_path / "in", tmp_path / "out")


def test_numbers_that_are_not_finite_are_told(tmp_path):
    values = [1.0, np.inf, np.nan]
    write(tmp_path / "a.tfrecord", [example(x=[x, 2.0], label=0) for x in values])
    notes = []
    adopt(tmp_path, tell=notes.append)
    assert "2 records have NaN or infinite values in 'x'" in notes


def test_options_that_cannot_hold(tmp_path):
    write(tmp_path / "a.tfrecord", [example(x=[0.5, 1.0], label=-1)])
    with pytest.raises(DataError, match="first_class=-1"):
        adopt(tmp_path)
    with pytest.raises(TfdistError, match="an image"):
        adopt(tmp_path, first_class=-1, resize="4x4")
    with pytest.raises(OptionError, match="first_class must be a whole number"):
        adopt(tmp_path, first_class="1")
    with pytest.raises(DataError, match="must be a folder of this machine"):
        adopt(tmp_path, "s3://bucket/folder")
    for classes in (tmp_path / "nowhere.txt", 10):
        with pytest.raises(OptionError, match="a text file with a name in each line"):
            adopt(tmp_path, classes=classes)
    for split in ({"train": ["a*", "b*"]}, {"train": 1}):
        with pytest.raises(OptionError, match="a dict with the pattern of the files of each split"):
            adopt(tmp_path, split=split)
    with pytest.raises(OptionError, match="a split's name must be letters"):
        adopt(tmp_path, split={1: "a*"})
    assert not (tmp_path / "manifest.json").exists()


def test_a_name_that_no_manifest_can_hold_is_refused(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xff"))
    folder.mkdir()
    write(folder / "a.tfrecord", [example(x=[0.5], label=n) for n in range(3)])
    with pytest.raises(DataError, match=r"a shard must be a file name.*udcff"):
        adopt(tmp_path)
    assert contents(tmp_path).keys() == {"a.tfrecord"}


def test_progress_is_that_of_the_bytes(tmp_path):
    folder = imagenet(tmp_path / "imagenet")
    told = []
    adopt(folder, progress=lambda done, total: told.append((done, total)))
    size = sum(path.stat().st_size for path in folder.glob("*-of-*"))
    assert max(told) == (size, size)


def test_photos_on_their_side_are_read_upright(tmp_path):
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, 8:] = 255  # The right half comes to be the lower one.
    exif = Image.Exif()
    exif[0x0112] = 6
    file = BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", exif=exif, quality=95)
    records = [example(image=file.getvalue(), label=number % 2) for number in range(4)]
    write(tmp_path / "d" / "train.tfrecord", records)
    told = []
    manifest = adopt(tmp_path / "d", tell=told.append)
    assert manifest.schema.features[0].shape == (16, 8, 3)
    assert any("4 images of 'image' say in EXIF" in note for note in told)
    x, _ = batch(tmp_path / "d" / "train", 4)
    assert np.abs(np.asarray(x).astype(int) - np.rot90(pixels, -1)).max() < 12
    adopt(tmp_path / "d", resize="8x4", tell=told.append)
    assert adopt(tmp_path / "d", labels="label").schema.features[0].reading.upright
    x, _ = batch(tmp_path / "d" / "train", 4)
    assert x[0, 0].numpy().max() < 20 < 235 < x[0, 7].numpy().min()
