"""What requests hold becomes records, or one line; without a server."""

from __future__ import annotations

import io
import json
import random
import warnings

import pytest
from PIL import Image

import tfdist
from tfdist.records.format.encoding import value_of
from tfdist.records.format.manifest import load_manifest
from tfdist.records.format.schema import Feature, Schema
from tfdist.records.writing import instances
from tfdist.records.writing.instances import InstanceError, Limits, as_asked, records_of

_ROWS = [
    {"age": 30, "size": 1.5, "city": "oslo", "on": "2024-01-01", "label": 0},
    {"age": 41, "size": -2.25, "city": "rome", "on": "2024-03-01", "label": 1},
    {"age": 7, "size": 0.5, "city": "oslo", "on": "2023-12-31", "label": 1},
]
_ODD = [
    None,
    True,
    -1,
    1e308,
    10**400,
    "",
    "oslo",
    "\ud800",
    [],
    {},
    [[1]],
    {"b64": "YQ=="},
    "a\nb",
]


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    """Of a training on a table with numbers, categories and dates."""
    folder = tmp_path_factory.mktemp("table")
    lines = [json.dumps(row) for row in _ROWS * 4]
    (folder / "table.jsonl").write_text("\n".join(lines))
    tfdist.records.write(folder / "table.jsonl", folder / "data", split="train=1")
    return as_asked(load_manifest(folder / "data").schema.of_role("input"))


def test_rows_of_a_table_are_the_records_of_the_training(schema):
    """Values by hand; the category has the number of the training."""
    asked = [{key: row[key] for key in row if key != "label"} for row in _ROWS]
    values = [
        {f.name: value_of(record, f) for f in schema.features}
        for record in records_of(schema, asked, Limits())
    ]
    city = next(f for f in schema.features if f.name == "city")
    assert [city.classes[int(row["city"])] for row in values] == ["oslo", "rome", "oslo"]
    numbers = next(f for f in schema.features if f.columns == ("age", "size"))
    found = [row[numbers.name].tolist() for row in values]
    assert found == [[30.0, 1.5], [41.0, -2.25], [7.0, 0.5]]


def test_an_odd_value_in_any_column_is_one_line_that_can_be_sent(schema):
    good = {key: value for key, value in _ROWS[0].items() if key != "label"}
    refused = []
    for name in good:
        for odd in _ODD:
            try:
                records_of(schema, [good, {**good, name: odd}], Limits())
            except InstanceError as error:
                refused.append(str(error))
    assert len(refused) > len(good) * len(_ODD) / 2
    assert not [text for text in refused if "\n" in text or not text.isprintable()]
    with pytest.raises(InstanceError, match="city"):
        records_of(schema, [good | {"city": "paris"}], Limits())
    with pytest.raises(InstanceError, match="as the first one is"):
        records_of(schema, [good, 1], Limits())


def test_plain_rows_are_the_same_bytes_the_quick_way(tmp_path):
    """As a table they are looked at column by column; whatever is not plain is left to that."""
    lines = [json.dumps({"a": n / 7, "b": n, "city": "xyz"[n % 3], "label": 0}) for n in range(9)]
    (tmp_path / "table.jsonl").write_text("\n".join(lines))
    tfdist.records.write(tmp_path / "table.jsonl", tmp_path / "data", split="train=1")
    schema = as_asked(load_manifest(tmp_path / "data").schema.of_role("input"))
    rng = random.Random(0)
    numbers = [0, -3, 2**53, 0.1, -0.0, 3.4028234e38, 1e-42, 16777217]
    rows = [{"a": rng.choice(numbers), "b": rng.gauss(0, 1e3), "city": c} for c in "xyz" * 30]
    rows[5] |= {"more": "is left aside"}
    for count in (1, 90):
        assert instances._of_plain_rows(schema, rows[:count]) == instances._of_rows(
            schema, rows[:count]
        )
    for odd in (None, True, "1", 2**53 + 1, 10**400, float("nan"), float("inf"), 1e39, [1.0]):
        assert instances._of_plain_rows(schema, [rows[0], rows[1] | {"a": odd}]) is None
    for other in ({}, 1, rows[0] | {"city": "w"}, rows[0] | {"city": 1}):
        assert instances._of_plain_rows(schema, [rows[0], other]) is None


def test_a_number_is_the_name_of_a_category_with_other_columns_or_without(tmp_path):
    rows = [f"{n % 20 + 1},{n % 7 + 1},{n % 2}" for n in range(140)]
    (tmp_path / "table.csv").write_text("\n".join(["user,item,label", *rows]))
    how = {"split": "train=1", "categories": "user,item"}
    tfdist.records.write(tmp_path / "table.csv", tmp_path / "data", **how)
    schema = as_asked(load_manifest(tmp_path / "data").schema.of_role("input"))
    asked = {"user": 7, "item": 3}
    for row in (asked, {"user": "7", "item": "3"}, {**asked, "more": 0}):
        (record,) = records_of(schema, [row], Limits())
        names = {f.name: f.classes[int(value_of(record, f))] for f in schema.features}
        assert names == {"user": "7", "item": "3"}
    for odd in (0, 21, 7.0, True, None, [7]):
        with pytest.raises(InstanceError, match="'user' must be one of its categories, by its nam"):
            records_of(schema, [{**asked, "user": odd}], Limits())


def test_null_is_the_category_of_what_is_missing(tmp_path):
    rows = [f"{'' if n % 5 == 0 else n % 5},{n % 2}" for n in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(["city,label", *rows]))
    how = {"split": "train=1", "categories": "city", "missing": "mask"}
    tfdist.records.write(tmp_path / "table.csv", tmp_path / "data", **how)
    schema = as_asked(load_manifest(tmp_path / "data").schema.of_role("input"))
    city = next(f for f in schema.features if f.name == "city")
    assert "" in city.classes
    for instance in ({"city": None}, {"city": None, "more": 0}):
        (record,) = records_of(schema, [instance], Limits())
        assert city.classes[int(value_of(record, city))] == ""


def test_dates_are_text_where_they_are_all_columns(tmp_path):
    rows = [f"{day:02}/06/2024,{day % 2}" for day in range(1, 29)]
    (tmp_path / "table.csv").write_text("\n".join(["on,label", *rows]))
    tfdist.records.write(tmp_path / "table.csv", tmp_path / "data", split="train=1")
    schema = as_asked(load_manifest(tmp_path / "data").schema.of_role("input"))
    (on,) = schema.features
    for instance in ("05/06/2024", {"on": "2024-06-05"}, {"on": "05/06/2024", "more": 0}):
        (record,) = records_of(schema, [instance], Limits())
        assert value_of(record, on) == 1717545600
    for odd in ("05/13/2024", "soon"):
        with pytest.raises(InstanceError, match="'on' must be a date, written as 2024-12-31"):
            records_of(schema, [odd], Limits())


def test_text_of_a_table_is_its_bytes_and_half_a_surrogate_is_refused(tmp_path):
    lines = [json.dumps({"text": f"word {n} of many others", "label": n % 2}) for n in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    tfdist.records.write(tmp_path / "text.jsonl", tmp_path / "data", split="train=1")
    schema = as_asked(load_manifest(tmp_path / "data").schema.of_role("input"))
    (feature,) = schema.features
    assert feature.dtype == "string"
    for other in ({}, {"more": 1}):  # As the value of the input, and as a row of the table.
        (record,) = records_of(schema, [{"text": "é\n", **other}], Limits())
        assert value_of(record, feature) == "é\n".encode()
    with pytest.raises(InstanceError, match="surrogates"):
        records_of(schema, [{"text": "\ud800", "more": 1}], Limits())


def test_the_pixels_of_all_photos_are_counted(tmp_path, monkeypatch):
    Image.new("RGB", (4, 5)).save(tmp_path / "a.png")
    (tmp_path / "photos" / "one").mkdir(parents=True)
    (tmp_path / "a.png").rename(tmp_path / "photos" / "one" / "a.png")
    tfdist.records.write(tmp_path / "photos", tmp_path / "data", split="train=1", resize="4x5")
    schema = as_asked(load_manifest(tmp_path / "data").schema.of_role("input"))
    file = io.BytesIO()
    Image.new("RGB", (10, 10)).save(file, "PNG")
    photo = file.getvalue()
    with monkeypatch.context() as patched:
        patched.setattr(warnings, "catch_warnings", None)  # Threads read requests.
        assert len(records_of(schema, [photo] * 3, Limits(pixels=100, all_pixels=300))) == 3
    with pytest.raises(InstanceError, match=r"instance 3: the photos of a request .* 399 pixels"):
        records_of(schema, [photo] * 4, Limits(pixels=100, all_pixels=399))
    with pytest.raises(InstanceError, match="instance 0: a photo must have at most 99 pixels"):
        records_of(schema, [photo], Limits(pixels=99))


def test_a_number_that_does_not_fit_is_refused_without_a_filter_of_warnings(monkeypatch):
    """Requests are read in threads, and filters are the process's."""
    number = Feature(name="x", dtype="float32", shape=(1,), encoding="float", role="input")
    with monkeypatch.context() as patched:
        patched.setattr(warnings, "catch_warnings", None)
        assert len(records_of(Schema((number,)), [[0.5]], Limits())) == 1
    for value in (1e300, 10**400):
        with pytest.raises(InstanceError, match=r"'x' must be float32 of shape \[1\]"):
            records_of(Schema((number,)), [[value]], Limits())
