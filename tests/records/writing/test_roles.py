"""What becomes an input, what a label, and what only the user can say."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.errors import DataError
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.roles import Asked, assign


def of_columns(names, last_is_label=True, doubtful=(), **asked):
    roles = assign(
        "t.csv",
        "column",
        names.split(","),
        Asked(**asked),
        last_is_label=last_is_label,
        doubtful=doubtful,
    )
    return ",".join(roles.inputs), ",".join(roles.labels), ",".join(roles.dropped)


@pytest.mark.parametrize(
    ("names", "asked", "roles"),
    [
        ("a,b,c", {}, ("a,b", "c", "")),
        ("a,label,c", {}, ("a,c", "label", "")),
        ("Target,a", {}, ("a", "Target", "")),
        ("a,b,label_2", {}, ("a,b", "label_2", "")),
        ("class_size,a,b", {}, ("class_size,a", "b", "")),
        ("a,b,c", {"label": "a"}, ("b,c", "a", "")),
        ("a,b,c", {"label": "a,c"}, ("b", "a,c", "")),
        ("a,b,c", {"label": ["a", "c"]}, ("b", "a,c", "")),
        ("0,1,2,3", {"label": 3, "drop": [0, 1]}, ("2", "3", "0,1")),
        ("0,1,label", {"weight": 1}, ("0", "label", "")),
        ("a,label,target", {"label": "label,target"}, ("a", "label,target", "")),
        ("a,label,target", {"label": "label", "drop": "target"}, ("a", "label", "target")),
        ("x,y,label", {"label": "label", "inputs": "x,y"}, ("x,y", "label", "")),
        ("id,a,b,label", {"inputs": "a,b"}, ("a,b", "label", "id")),
        ("id,a,b,c", {"inputs": "a,b"}, ("a,b", "c", "id")),
        ("id,a,label", {"drop": "id"}, ("a", "label", "id")),
        ("a,sample_weight,label", {}, ("a", "label", "")),
        ("a,where,label", {"client": "where"}, ("a", "label", "")),
    ],
)
def test_roles(names, asked, roles):
    assert of_columns(names, **asked) == roles


@pytest.mark.parametrize(
    ("names", "asked", "message"),
    [
        ("a,label,target", {}, "several may be, but found label, target"),
        ("x,y,label", {}, "several may be, but found y, label"),
        ("label_a,label_b,c", {}, "several may be, but found label_a, label_b"),
        ("label_a,b,c", {}, "several may be, but found label_a, c"),
        (
            "a,label,target",
            {"label": "label"},
            "by accident, but found column target beside the label",
        ),
        ("y1,y2,y3", {"label": "y1"}, "by accident, but found columns y2, y3"),
        ("a,label", {"label": "lable"}, "'lable', but found columns a, label. Write 'label'"),
        ("a,label", {"inputs": "zzz"}, "'zzz', but found columns a, label"),
        ("a,label", {"label": "label,label"}, "once, but found label, label"),
        ("a,b,c", {"label": "a,b", "drop": "b"}, "one role, but found two for b"),
        ("a,b,c", {"label": "a", "inputs": "a,b"}, "one role, but found two for a"),
        ("a,b,c", {"weight": "a,b"}, "the column 'a,b', but found columns a, b, c"),
        ("a,b", {"client": "z"}, "'z', but found columns a, b"),
        ("a,b", {"client": "a", "drop": "a"}, "two for a"),
        ("a,b", {"label": "a,b"}, "an input column beside the label"),
        ("a,b", {"label": ""}, "''"),
    ],
)
def test_what_must_be_said(names, asked, message):
    with pytest.raises(DataError, match=message):
        of_columns(names, **asked)


class TestCsv:
    def write(self, tmp_path, text):
        path = tmp_path / "t.csv"
        path.write_text(text)
        return path

    def test_several_labels(self, tmp_path):
        path = self.write(tmp_path, "a,kind,b,size\n1,x,2,0.5\n3,y,4,1\n")
        columns = read_raw(path, Asked(label="kind,size"))
        kind, size = columns.schema.of_role("label")
        assert (kind.name, kind.classes, size.name, size.dtype) == (
            "kind",
            ("x", "y"),
            "size",
            "float32",
        )
        rows = columns.block(np.arange(2))
        np.testing.assert_array_equal(rows["features"], [[1, 2], [3, 4]])
        np.testing.assert_array_equal(rows["kind"], [0, 1])
        np.testing.assert_array_equal(rows["size"], [0.5, 1])
        assert columns.roles == (
            ("a", "input"),
            ("kind", "label"),
            ("b", "input"),
            ("size", "label"),
        )

    def test_weights_and_dropped_text(self, tmp_path):
        path = self.write(tmp_path, "name,a,sample_weight,label\nann,1,0.5,0\nbob,2,2,1\n")
        columns = read_raw(path, Asked(drop="name"))
        assert [feature.role for feature in columns.schema.features] == ["input", "label", "weight"]
        np.testing.assert_array_equal(columns.block(np.arange(2))["sample_weight"], [0.5, 2])
        assert dict(columns.roles) == {
            "name": "dropped",
            "a": "input",
            "sample_weight": "weight",
            "label": "label (by its name)",
        }

    def test_a_name_with_a_comma(self, tmp_path):
        path = self.write(tmp_path, '"a,b",c\n1,2\n')
        assert read_raw(path, Asked(label="a,b")).roles[0] == ("a,b", "label")


class TestNpz:
    def save(self, tmp_path, **arrays):
        np.savez(tmp_path / "t.npz", **arrays)
        return tmp_path / "t.npz"

    def test_a_second_label_is_no_input(self, tmp_path):
        numbers = np.arange(4)
        path = self.save(tmp_path, x=np.zeros((4, 2)), y=numbers, even=numbers % 2)
        with pytest.raises(DataError, match="by accident, but found array even beside the label y"):
            read_raw(path)
        labels = read_raw(path, Asked(label="y,even")).schema.of_role("label")
        assert [feature.name for feature in labels] == ["y", "even"]
        schema = read_raw(path, Asked(inputs="x,even")).schema
        assert [feature.name for feature in schema.of_role("input")] == ["x", "even"]
        columns = read_raw(path, Asked(drop="even"))
        assert dict(columns.roles)["even"] == "dropped"
        assert "even" not in columns.columns

    def test_numbers_that_are_called_as_inputs_are(self, tmp_path):
        path = self.save(tmp_path, x1=np.arange(4.0), x_2=np.arange(4.0), target=np.arange(4))
        assert len(read_raw(path).schema.of_role("input")) == 2

    def test_one_array_beside_the_label_is_the_input(self, tmp_path):
        path = self.save(tmp_path, age=np.arange(4.0), y=np.arange(4))
        assert read_raw(path).schema.of_role("input")[0].name == "age"

    def test_clients(self, tmp_path):
        path = self.save(tmp_path, x=np.zeros((4, 2)), who=np.arange(4), y=np.arange(4))
        columns = read_raw(path, Asked(client="who"))
        assert dict(columns.roles)["who"] == "client, no input"
        assert [f.name for f in columns.schema.features] == ["x", "y"]
