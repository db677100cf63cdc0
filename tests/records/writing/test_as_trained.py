"""New photos and tables are read as those of the training were."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tfdist.errors import DataError
from tfdist.records import read, write
from tfdist.records.writing.as_trained import find_raw, write_as_trained


def _image(path, shape, value=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(sum(shape)).integers(0, 255, shape)
    pixels = np.full(shape, value) if value is not None else pixels
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def _rows(folder):
    """Returns the records of a folder with one split, in their order."""
    (batch,) = read(folder, batch_size=100, cache=False)
    return batch[0]


@pytest.fixture
def photos(tmp_path):
    for number in range(6):
        _image(tmp_path / "raw" / "ab"[number % 2] / f"{number}.png", (9 + number, 7, 3))
    return tmp_path / "raw"


@pytest.mark.parametrize("how", [{"fit": "pad"}, {"fit": "crop", "color": "gray"}])
def test_photos_become_the_pixels_that_they_were_in_the_training(photos, tmp_path, how):
    manifest = write(photos, tmp_path / "data", split="train=1", resize="4x5", **how)
    keys = write_as_trained(photos, manifest.schema, tmp_path / "new")
    assert keys.column == "file"
    assert " ".join(keys.values) == "a/0.png a/2.png a/4.png b/1.png b/3.png b/5.png"
    found, trained = _rows(tmp_path / "new"), _rows(tmp_path / "data")
    assert found.shape == trained.shape
    place = {row.numpy().tobytes() for row in trained}
    assert {row.numpy().tobytes() for row in found} == place
    for number, name in enumerate(keys.values):  # Each alone is what it is among others.
        write_as_trained(photos / name, manifest.schema, tmp_path / f"alone{number}")
        (alone,) = _rows(tmp_path / f"alone{number}")
        np.testing.assert_array_equal(alone, found[number])


def test_photos_of_any_kind_anywhere_in_a_folder(photos, tmp_path):
    manifest = write(photos, tmp_path / "data", split="train=1", resize="4x4")
    new = tmp_path / "some"
    names = ["1.jpg", "2.webp", "deep/er/3.bmp", "gray.png"]
    for number, name in enumerate(names):
        _image(new / name, (8, 8) if name == "gray.png" else (8, 8, 3), 60 * number)
    _image(new / ".hidden" / "0.png", (8, 8, 3))
    (new / "notes.txt").write_text("no photo")
    keys = write_as_trained(new, manifest.schema, tmp_path / "new")
    assert keys.values.tolist() == names
    found = _rows(tmp_path / "new")[:, 0, 0, 0]
    np.testing.assert_allclose(found, [0, 60, 120, 180], atol=1)  # JPEG and WebP round.


def test_photos_that_cannot_be_are_told(photos, tmp_path):
    schema = write(photos, tmp_path / "data", split="train=1").schema
    with pytest.raises(DataError, match=r"must say the size.*adopt DIR --resize HxW"):
        write_as_trained(photos, schema, tmp_path / "new")
    schema = write(photos, tmp_path / "sized", split="train=1", resize="4x4").schema
    (photos / "a" / "bad.jpg").write_bytes(b"\xff\xd8\xffnone")
    with pytest.raises(DataError, match=r"found 1 that cannot: .*bad\.jpg.* Repair or remove them"):
        write_as_trained(photos, schema, tmp_path / "new")
    (tmp_path / "t.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match=r"trained on, the image 'image', but found the table"):
        write_as_trained(tmp_path / "t.csv", schema, tmp_path / "new")
    (tmp_path / "x.npz").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"a folder of photos, or a table .* found .*x\.npz\. Of arrays"
    ):
        write_as_trained(tmp_path / "x.npz", schema, tmp_path / "new")
    assert not (tmp_path / "new").exists()


_TABLE = "id,size,color,free,when,wide,sick\n" + "".join(
    f"{n},{n / 2},{['red', 'green', 'blue'][n % 3]},text {n},2020-01-{n + 1:02d},{n},{n % 2}\n"
    for n in range(20)
)


@pytest.fixture
def table(tmp_path):
    (tmp_path / "old.csv").write_text(_TABLE)
    return write(tmp_path / "old.csv", tmp_path / "data", split="train=1").schema


def _new(tmp_path, text):
    (tmp_path / "new.csv").write_text(text)
    return tmp_path / "new.csv"


def test_a_table_without_labels_in_another_order_has_the_numbers_of_the_training(table, tmp_path):
    text = "wide,when,color,note,free,size\n3,2020-01-04,red,?,a,1.5\n4,2020-01-05,blue,?,b,-2\n"
    keys = write_as_trained(_new(tmp_path, text), table, tmp_path / "new")
    assert (keys.column, keys.values.tolist()) == ("row", [0, 1])
    found, old = _rows(tmp_path / "new"), _rows(tmp_path / "data")
    assert {name: x.dtype for name, x in found.items()} == {n: x.dtype for n, x in old.items()}
    np.testing.assert_array_equal(found["features"], [[1.5, 3], [-2, 4]])
    assert found["color"].numpy().tolist() == [2, 0]  # blue, green, red.
    assert found["free"].numpy().tolist() == [b"a", b"b"]
    (same,) = np.flatnonzero(old["features"][:, 1] == 3)
    assert found["when"][0] == old["when"][same]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size,color,free\n1,red,a\n", r"no column wide, when, and the columns size, color, free"),
        ("size,color,free,when,wide\n1,pink,a,2020-01-01,2\n", "'pink'. Choose among blue, green"),
        ("size,color,free,when,wide\n?1,red,a,2020-01-01,2\n", "another kind, in size. Mend"),
        ("size,color,free,when,wide\n1,red,a,7,2\n", "another kind, in when. Mend"),
        ("size,color,free,when,wide\n1,red,a,2020-01-01,\n", "in column 'wide'|kind, in wide"),
    ],
)
def test_tables_that_are_others_are_told(table, tmp_path, text, message):
    with pytest.raises(DataError, match=message) as raised:
        write_as_trained(_new(tmp_path, text), table, tmp_path / "new")
    assert "--" not in str(raised.value)  # There are no such options.
    assert not (tmp_path / "new").exists()


def test_missing_values_are_told_to_the_model_as_in_the_training(tmp_path):
    old = tmp_path / "old.csv"
    old.write_text("a,c,b,y\n1,x,,0\n,z,2,1\n3,z,4,0\n")
    how = {"split": "train=1", "num_shards": 1, "missing": "mask", "categories": "c"}
    schema = write(old, tmp_path / "data", **how).schema
    text = "b,a,c\n,1,z\n5,6,x\n"
    write_as_trained(_new(tmp_path, text), schema, tmp_path / "new")
    found = _rows(tmp_path / "new")
    np.testing.assert_array_equal(found["features"], [[1, 0], [6, 5]])
    assert found["c"].numpy().tolist() == [1, 0]
    np.testing.assert_array_equal(found["missing"], [[0, 0, 1], [0, 0, 0]])
    write_as_trained(_new(tmp_path, "b,a,c\n,,x\n"), schema, tmp_path / "one")  # None in any row.
    found = _rows(tmp_path / "one")
    np.testing.assert_array_equal(found["features"], [[0, 0]])
    np.testing.assert_array_equal(found["missing"], [[1, 0, 1]])


def test_words_for_missing_values_are_what_the_training_took_them_for(tmp_path, capsys):
    rows = [f"word{n} x{n},{'uv'[n % 2]},{n},{n % 2}" for n in range(12)] + ["NA,none,99,1"]
    (tmp_path / "old.csv").write_text("note,kind,age,label\n" + "\n".join(rows) + "\n")
    how = {"split": "train=1", "num_shards": 1, "label": "label", "missing": "mask"}
    schema = write(tmp_path / "old.csv", tmp_path / "data", **how).schema
    write_as_trained(tmp_path / "old.csv", schema, tmp_path / "new")
    names = ("features", "note", "kind", "missing")
    was, now = (
        {
            age: (note, kind, *mask)
            for (age,), note, kind, mask in zip(
                *(_rows(tmp_path / folder)[name].numpy().tolist() for name in names), strict=True
            )
        }
        for folder in ("data", "new")
    )
    assert was[99] == (b"", 0, 1, 1, 0)
    assert now == was
    assert "'NA' in column 'note' is read as a missing value" in capsys.readouterr().err


def test_shards_are_told_from_what_is_none(table, tmp_path):
    assert find_raw(tmp_path / "data") is None
    assert find_raw(tmp_path / "data" / "train") is None
    assert find_raw("s3://bucket/data") is None
    assert find_raw(tmp_path / "old.csv") == tmp_path / "old.csv"
    _image(tmp_path / "photos" / "1.png", (4, 4, 3))
    assert find_raw(str(tmp_path / "photos")) == tmp_path / "photos"
    with pytest.raises(DataError, match=r"a photo, .* nothing, which does not exist"):
        find_raw("nothing")


def _dates(text):
    return np.array(text.split(), "datetime64[s]").astype(np.int64).tolist()


@pytest.mark.parametrize("order", [("{0:02}/{1:02}/2024", True), ("{1:02}/{0:02}/2024", False)])
def test_days_and_months_have_the_order_of_the_training(order, tmp_path):
    """No new row has a day beyond 12: without the training's it would be text, or categories."""
    form, day_first = order
    lines = [f"{form.format(day, 6)},{day},{day % 2}" for day in range(1, 29)]
    (tmp_path / "old.csv").write_text("\n".join(["on,a,y", *lines]))
    schema = write(tmp_path / "old.csv", tmp_path / "data", split="train=1").schema
    assert {f.name: f.day_first for f in schema.features if f.role == "input"} == {
        "features": None,
        "on": day_first,
    }
    rows = f"{form.format(5, 6)},1\n {form.format(6, 6)} 01:00,1\n" * 4
    write_as_trained(_new(tmp_path, "on,a\n" + rows), schema, tmp_path / "new")
    found = _rows(tmp_path / "new")["on"].numpy().tolist()
    assert found == _dates("2024-06-05 2024-06-06T01:00") * 4
    # The other order is none, though these rows alone would tell it.
    other = form.format(6, 13)
    with pytest.raises(DataError, match=r"kind, in on\. .* written as 2024-12-31"):
        write_as_trained(_new(tmp_path, f"on,a\n{other},1\n"), schema, tmp_path / "not")


def test_dates_that_nobody_can_read_are_no_categories(tmp_path):
    lines = [f"2024-06-{day:02},{day},{day % 2}" for day in range(1, 29)]
    (tmp_path / "old.csv").write_text("\n".join(["on,a,y", *lines]))
    schema = write(tmp_path / "old.csv", tmp_path / "data", split="train=1").schema
    rows = "05/06/2024,1\n06/06/2024,1\n" * 5
    with pytest.raises(DataError, match=r"kind, in on\. .* written as 2024-12-31"):
        write_as_trained(_new(tmp_path, "on,a\n" + rows), schema, tmp_path / "new")
