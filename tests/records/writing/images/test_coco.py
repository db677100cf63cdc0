"""Annotations as COCO has them: the boxes of all images, in parts of height and width."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from tfdist.errors import DataError
from tfdist.records import check, write
from tfdist.records.writing.images.options import ImageOptions
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.roles import Asked

CATEGORIES = [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}, {"id": 7, "name": "a"}]


def annotation(image, category, box, crowd=0):
    outline = [[0, 0, 1, 1, 2, 2]]
    about = {"image_id": image, "category_id": category, "bbox": box}
    return {**about, "iscrowd": crowd, "segmentation": outline}


def save(folder, split, first, annotations, sizes=((40, 20), (10, 50), (30, 30))):
    images = []
    for number, (width, height) in enumerate(sizes, first):
        name = f"{number:012d}.jpg"
        (folder / split).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (width, height)).save(folder / split / name)
        images.append({"id": number, "file_name": name, "height": height, "width": width})
    value = {"images": images, "annotations": annotations, "categories": CATEGORIES}
    (folder / "annotations").mkdir(exist_ok=True)
    (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(value, indent=1))
    return value


@pytest.fixture
def coco(tmp_path):
    folder = tmp_path / "coco"
    boxes = [annotation(2, 1, [5, 10, 5, 20]), annotation(1, 90, [10, 5, 20, 15])]
    save(folder, "train2017", 1, [*boxes, annotation(1, 1, [0, 0, 40, 20])])
    save(folder, "val2017", 7, [annotation(9, 90, [0.0, 15.0, 7.5, 15.0])])
    (folder / "annotations" / "captions_train2017.json").write_text("{}")
    return folder


def opened(folder, asked=None, **options):
    return read_raw(folder, asked, images=ImageOptions(**options))


def test_boxes_and_kinds(coco):
    columns = opened(coco)
    boxes, kinds = columns.schema.of_role("label")
    assert (boxes.name, boxes.shape, boxes.dtype) == ("boxes", (None, 4), "float32")
    # All categories are classes, whether an image has them or not.
    assert (kinds.name, kinds.classes) == ("kinds", ("a", "person", "toothbrush"))
    assert {name: len(rows) for name, rows in columns.splits.items()} == {
        "train": 3,
        "validation": 3,
    }
    block = columns.block(np.arange(6))
    wanted = [[[0.25, 0.25, 1.0, 0.75], [0, 0, 1, 1]], [[0.2, 0.5, 0.6, 1.0]], [], [], []]
    wanted.append([[0.5, 0, 1, 0.25]])
    assert [box.tolist() for box in block["boxes"]] == [
        np.array(box, np.float32).tolist() for box in wanted
    ]
    assert [kind.tolist() for kind in block["kinds"]] == [[2, 1], [1], [], [], [], [2]]
    (told,) = [text for text in columns.notes if "4 boxes, in parts of height" in text]
    assert "instances_train2017.json" in told
    assert any("segmentation" in text for text in columns.notes)
    (left_out,) = [text for text in columns.notes if "as no images" in text]
    assert left_out.endswith("captions_train2017.json")


def test_written_as_any_images(coco, tmp_path):
    manifest = write(coco, tmp_path / "out", num_shards=1, resize="32x32")
    assert check(tmp_path / "out") == []
    assert {name: split.records for name, split in manifest.splits.items()} == {
        "train": 3,
        "validation": 3,
    }
    with pytest.raises(DataError, match="must be stretched"):
        write(coco, tmp_path / "cut", resize="32x32", fit="crop")


@pytest.mark.parametrize("labels", ["coco/annotations/instances_val2017.json", "other.json"])
def test_one_file(coco, tmp_path, labels, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = (coco / "annotations" / "instances_val2017.json").read_bytes()
    (tmp_path / "other.json").write_bytes(content)
    columns = opened(coco / "val2017", labels=labels)
    assert columns.num_records == 3
    assert [len(boxes) for boxes in columns.block(np.arange(3))["boxes"]] == [0, 0, 1]


def test_a_file_of_no_split_among_others_is_told(coco):
    told = "divide nothing, as instances_extra.json says no split"
    assert not any(told in note for note in opened(coco).notes)
    save(coco, "extra", 20, [])
    columns = opened(coco)
    assert columns.splits is None
    assert any(told in note for note in columns.notes)


def test_crowds_are_told_apart(tmp_path):
    boxes = [annotation(1, 1, [0, 0, 4, 4]), annotation(1, 7, [0, 0, 40, 20], crowd=1)]
    save(tmp_path, "train", 1, boxes)
    columns = opened(tmp_path)
    assert [feature.name for feature in columns.schema.of_role("label")] == [
        "boxes",
        "kinds",
        "crowd",
    ]
    assert columns.block(np.arange(1))["crowd"][0].tolist() == [0, 1]
    columns = opened(tmp_path, Asked(drop="crowd"), labels="annotations")
    assert len(columns.schema.of_role("label")) == 2


def test_what_does_not_fit_is_told_at_once(tmp_path):
    value = save(tmp_path, "train2017", 1, [annotation(3, 1, [0, 0, 4, 4])])
    Image.new("RGB", (20, 40)).save(tmp_path / "train2017" / "000000000001.jpg")
    (tmp_path / "train2017" / "000000000002.jpg").unlink()
    with pytest.raises(DataError) as raised:
        opened(tmp_path)
    text = str(raised.value)
    assert "20x40 pixels where instances_train2017.json, image 1 has 40x20" in text
    assert "instances_train2017.json, image 2: 000000000002.jpg, which is no image here" in text
    assert opened(tmp_path, skip_bad=True).num_records == 1
    bad = [annotation(99, 1, [0, 0, 1, 1]), annotation(1, 2, [0, 0, 1, 1]), annotation(1, 1, [0])]
    value |= {"annotations": [*value["annotations"], *bad]}
    (tmp_path / "annotations" / "instances_train2017.json").write_text(json.dumps(value))
    with pytest.raises(DataError, match=r"3 that are not: instances_train2017\.json: annotation 1"):
        opened(tmp_path)
    (tmp_path / "annotations" / "instances_train2017.json").write_text("[1]")
    with pytest.raises(DataError, match="must hold COCO's images"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "entry", "told"),
    [
        ("categories", {"id": 1, "name": "car"}, "category 3"),
        ("categories", {"id": [1], "name": "car"}, "category 3"),
        ("images", {"id": 2, "file_name": "x.jpg", "height": 4, "width": 4}, "image 3"),
        ("images", {"file_name": "x.jpg", "height": 4, "width": 4}, "image 3"),
        ("annotations", annotation([1], 1, [0, 0, 1, 1]), "annotation 1"),
        ("annotations", annotation(1, 1, [4, 4, -2, 2]), "annotation 1"),
        ("annotations", annotation(1, 1, [4, 4, 400, 2]), "annotation 1"),
        ("annotations", annotation(1, 1, [4, 4, 2, 2], crowd="0"), "annotation 1"),
        ("annotations", annotation(1, 1, [10**400, 4, 2, 2]), "annotation 1"),
        ("annotations", annotation(1, 1, [4, 4, 2, 2]) | {"id": 5}, "annotation 1"),
        ("annotations", annotation(True, 1, [4, 4, 2, 2]), "annotation 1"),
    ],
)
def test_what_is_not_of_one_thing_alone(tmp_path, name, entry, told):
    """An id that comes twice would give boxes to another image, or another name."""
    value = save(tmp_path, "train", 1, [annotation(3, 1, [0, 0, 4, 4]) | {"id": 5}])
    value[name] = [*value[name], entry]
    (tmp_path / "annotations" / "instances_train.json").write_text(json.dumps(value))
    with pytest.raises(
        DataError, match=rf"1 that are not: instances_train\.json: {told}\. Mend or"
    ):
        opened(tmp_path)


def test_categories_of_one_name(tmp_path):
    """One may stand for a group of them; where boxes are of both, they are no one class."""
    boxes = [annotation(1, 1, [0, 0, 4, 4]), annotation(2, 8, [0, 0, 4, 4])]
    value = save(tmp_path, "train", 1, boxes[:1])
    path = tmp_path / "annotations" / "instances_train.json"
    value["categories"] = [*CATEGORIES, {"id": 8, "name": "person"}]
    path.write_text(json.dumps(value))
    assert opened(tmp_path).num_records == 3
    path.write_text(json.dumps(value | {"annotations": boxes}))
    with pytest.raises(DataError, match=r"each category with a name of its own.* annotation 1\."):
        opened(tmp_path)


def test_keys_that_come_twice(tmp_path):
    value = save(tmp_path, "train", 1, [annotation(1, 1, [0, 0, 4, 4])])
    text = json.dumps(value).replace('"bbox"', '"bbox": [1, 1, 1, 1], "bbox"')
    (tmp_path / "annotations" / "instances_train.json").write_text(text)
    with pytest.raises(DataError, match=r"instances_train\.json must be a JSON.*'bbox' twice"):
        opened(tmp_path)
