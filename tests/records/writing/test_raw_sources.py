"""What can be written, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.errors import DataError
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.roles import Asked

CSV = "height,width,species\n1,2,cat\n3,4.5,dog\n5,6,cat\n"


def write_csv(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def all_rows(columns):
    return columns.block(np.arange(columns.num_records))


def test_digits():
    columns = read_raw("digits")
    image, label = columns.schema.features
    assert (image.shape, image.dtype, image.encoding) == ((8, 8, 1), "uint8", "raw")
    assert label.classes == tuple("0123456789")
    assert columns.num_records == 1797
    assert all_rows(columns)["image"].max() == 16


@pytest.mark.parametrize("role", ["label", "sample_weight"])
def test_targets_and_weights_that_float32_cannot_hold(role):
    values = np.array([0.5, 1e39])
    parts = (values,) if role == "label" else (np.zeros(2), values)
    with pytest.raises(DataError, match=f"array '{role}' .* float32 can hold, but found 1e\\+39"):
        read_raw((np.zeros((2, 3)), *parts))


@pytest.mark.parametrize("role", ["label", "sample_weight"])
def test_whole_numbers_that_float32_rounds_are_told(role):
    for values, is_told in (([0.1, 2.0**25], False), ([0.1, 2.0**25 + 1], True)):
        parts = (values,) if role == "label" else (np.zeros(2), values)
        notes = read_raw((np.zeros((2, 3)), *parts)).notes
        assert [f"rounded to float32: '{role}'" in note for note in notes] == [True] * is_told


def test_labels_beyond_int64_are_told_as_they_are():
    with pytest.raises(DataError, match="found 9223372036854775808 in 'label', record 1"):
        read_raw((np.zeros(2), np.array([0, 2**63], np.uint64)))


def test_a_dict_of_splits_is_no_dict_of_arrays():
    with pytest.raises(DataError, match="'test' of a dict of arrays must be one array"):
        read_raw({"x": np.zeros(3), "test": (np.zeros(3), np.zeros(3))})


def test_masked_values_are_missing():
    values = np.ma.masked_equal(np.arange(6.0).reshape(3, 2), 3)
    with pytest.raises(DataError, match="'x' some values of which are masked"):
        read_raw((values, np.zeros(3)))
    assert all_rows(read_raw((np.ma.masked_equal(np.ones(3), 3), np.zeros(3))))["x"].sum() == 3


class TestCsv:
    def test_text_labels_become_sorted_classes(self, tmp_path):
        columns = read_raw(write_csv(tmp_path, CSV))
        features, label = columns.schema.features
        assert features.columns == ("height", "width")
        assert (features.dtype, features.shape, features.encoding) == ("float32", (2,), "float")
        assert label.classes == ("cat", "dog")
        np.testing.assert_array_equal(all_rows(columns)["features"], [[1, 2], [3, 4.5], [5, 6]])
        np.testing.assert_array_equal(all_rows(columns)["label"], [0, 1, 0])

    def test_integer_labels_stay_and_floats_are_targets(self, tmp_path):
        columns = read_raw(write_csv(tmp_path, "age,b\n30,1\n40,2\n"), Asked(label="age"))
        assert columns.schema.class_label is not None
        columns = read_raw(write_csv(tmp_path, "a,b,target\n1,2,0.5\n"))
        assert columns.schema.class_label is None
        assert columns.schema.features[1].dtype == "float32"

    def test_a_column_called_label_is_the_label(self, tmp_path):
        columns = read_raw(write_csv(tmp_path, "label,a\n1,2\n"))
        assert columns.schema.features[0].columns == ("a",)

    @pytest.mark.parametrize(
        ("text", "label", "message"),
        [
            ("a,b\n1,2\n3\n", None, "1 in line 3"),
            ("a,b\n1,2\n3,4,5\n", None, "3 in line 3"),
            ("a,b\n1,2\n,4\n", None, "line 3, column 'a'"),
            ("a,b\n1,2\nNaN,4\n", None, "line 3, column 'a'"),
            ("a,b\n1,2\n3,\n", None, "line 3, column 'b'"),
            ("a,b\n1,2\nn/a,4\n", None, "'n/a' in line 3"),
            ("a,b\n1,2\n", "c", "columns a, b"),
            ("a,b\n1,-2\n", None, "-2 in 'label'"),
            ("a,b,sample_weight\n1,2,1\n1,2,-1\n", "b", "'-1, a weight below 0' in line 3"),
            ("a,b\n", None, "rows below its header"),
            ("", None, "an empty line"),
            ("a,a\n1,2\n", None, "each once"),
            ("a\n1\n", None, "an input column beside the label"),
            ('a,b\n"1,2\n', None, "comma-separated"),
        ],
    )
    def test_bad_tables(self, tmp_path, text, label, message):
        with pytest.raises(DataError, match=message):
            read_raw(write_csv(tmp_path, text), Asked(label=label))


class TestNpz:
    def save(self, tmp_path, **arrays):
        path = tmp_path / "arrays.npz"
        np.savez(path, **arrays)
        return path

    def test_roles(self, tmp_path):
        path = self.save(
            tmp_path,
            a=np.zeros((4, 2)),
            b=np.zeros((4, 3)),
            y=np.arange(4),
            sample_weight=np.ones(4),
        )
        roles = {f.name: f.role for f in read_raw(path).schema.features}
        assert roles == {"a": "input", "b": "input", "y": "label", "sample_weight": "weight"}

    def test_label_by_name(self, tmp_path):
        path = self.save(tmp_path, a=np.zeros((4, 2)), goal=np.arange(4))
        assert read_raw(path, Asked(label="goal")).schema.class_label.name == "goal"
        with pytest.raises(DataError, match="arrays a, goal"):
            read_raw(path)

    def test_objects_are_refused(self, tmp_path):
        path = self.save(tmp_path, x=np.array([{}, {}], object), y=np.arange(2))
        with pytest.raises(DataError, match=r"numbers or text.*allow_pickle=True\)\['x'\]"):
            read_raw(path)

    def test_not_an_archive(self, tmp_path):
        path = tmp_path / "a.npz"
        path.write_text("text")
        with pytest.raises(DataError, match="archive"):
            read_raw(path)

    def test_no_input(self, tmp_path):
        with pytest.raises(DataError, match="input array"):
            read_raw(self.save(tmp_path, y=np.arange(2)))


class TestArrays:
    def test_storage(self):
        x = {
            "tokens": np.zeros((3, 5), np.int64),
            "age": np.zeros(3, np.int32),
            "big": np.zeros((3, 2), ">f4"),
            "mask": np.zeros((3, 2), bool),
            "wide": np.zeros((3, 2), np.float64),
        }
        schema = read_raw((x, np.zeros(3, np.uint8), np.ones(3))).schema
        stored = {f.name: (f.dtype, f.encoding) for f in schema.features}
        assert stored == {
            "tokens": ("int64", "int64"),
            "age": ("int32", "int64"),
            "big": ("float32", "float"),
            "mask": ("bool", "raw"),
            "wide": ("float64", "raw"),
            "label": ("int64", "int64"),
            "sample_weight": ("float32", "float"),
        }

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ((np.zeros((3, 2)), np.zeros(4)), "'x' 3, 'label' 4"),
            ((np.zeros((0, 2)), np.zeros(0)), "at least one record"),
            ((np.zeros((3, 0)), np.zeros(3)), "must have values"),
            (np.float32(1), "a scalar"),
            ((np.array([1j, 2j]), np.zeros(2)), "dtype of array 'x'"),
            ((np.array(["a", None], object), np.zeros(2)), "NoneType None in record 1"),
            ((np.zeros(2), np.zeros(2), np.array(["a", "b"])), "weight 'sample_weight'.*numbers"),
            ((np.array([[1.0], [np.nan]]), np.zeros(2)), "NaN in array 'x', record 1"),
            ((np.array([0, np.inf, -np.inf]), np.zeros(3)), "finite.* inf in array 'x', record 1"),
            (([[1.0], [2.0, -np.inf]], np.zeros(2)), "finite.* -inf in array 'x', record 1"),
            ((np.zeros(2), np.array([0, np.inf])), "finite.* inf in array 'label', record 1"),
            ((np.zeros(2), np.zeros(2), np.array([1, -0.5])), r"0 or more.* -0\.5 .* record 1"),
            ((np.zeros((2, 2)), np.array([0, -1])), "-1 in 'label', record 1"),
            ((np.zeros(2), np.zeros(2), np.zeros((2, 2))), "one number a record"),
            ((np.zeros(2),) * 4, "a tuple of 4"),
            (({"label": np.zeros(2)}, np.zeros(2)), "'label' twice"),
        ],
    )
    def test_bad_arrays(self, source, message):
        with pytest.raises(DataError, match=message):
            read_raw(source)

    def test_sums_that_overflow_are_looked_at(self):
        large = np.finfo(np.float32).max
        read_raw((np.array([large, large]), np.zeros(2)))

    def test_class_ids_beyond_the_classes(self):
        from tfdist.records.format.columns import from_arrays

        with pytest.raises(DataError, match="0 to 1"):
            from_arrays(
                "arrays",
                {"x": np.zeros(3)},
                {"label": [0, 1, 2]},
                classes={"label": ["a", "b"]},
            )


def test_what_is_no_source(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    for source in (tmp_path / "a.txt", tmp_path / "nowhere", "nowhere"):
        with pytest.raises(DataError, match="the source must be"):
            read_raw(source)
    for name, mend in (("a.xlsx", "Save it as CSV"), ("a.json", "Save it as JSON lines")):
        (tmp_path / name).write_text("x")
        with pytest.raises(DataError, match=rf"the source must be .*{name}'\. {mend}"):
            read_raw(tmp_path / name)
    with pytest.raises(DataError, match=r"must go with a table or a \.npz file"):
        read_raw("digits", Asked(label="label"))


@pytest.mark.parametrize(
    ("name", "mend"), [("t.csv.bz2", "Convert it to one of these"), ("t.xlsx", "Save it as CSV")]
)
def test_a_file_of_another_kind_is_refused_whatever_is_asked_of_it(tmp_path, name, mend):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=rf"the source must be .*{name}'. {mend}"):
        read_raw(tmp_path / name, Asked(label="y", missing="drop"))
