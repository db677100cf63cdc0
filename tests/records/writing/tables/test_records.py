"""From a table to records: what is packed, filled, left out and told."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.errors import DataError, OptionError
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.roles import Asked

MESSY = ["id,age,colour,member,since,comment,label"] + [
    f"{n + 1},{20 + n},{'red' if n % 3 else 'blue'},{'yes' if n % 2 else 'no'},"
    f"2024-01-{n % 28 + 1:02d},comment {n},{n % 2}"
    for n in range(40)
]


def read(tmp_path, lines, **asked):
    path = tmp_path / "t.csv"
    path.write_text(lines if isinstance(lines, str) else "\n".join(lines) + "\n")
    return read_raw(path, Asked(**asked))


def rows(columns):
    return columns.block(np.arange(columns.num_records))


def changed(row, column, value):
    """Returns the messy table with another value."""
    lines = [line.split(",") for line in MESSY]
    lines[row][lines[0].index(column)] = value
    return [",".join(line) for line in lines]


def test_a_messy_table(tmp_path):
    columns = read(tmp_path, MESSY)
    assert [(f.name, f.dtype, f.shape, f.columns, f.classes) for f in columns.schema.features] == [
        ("features", "float32", (2,), ("age", "member"), None),
        ("colour", "int64", (), ("colour",), ("blue", "red")),
        ("since", "int64", (), ("since",), None),
        ("comment", "string", (), None, None),
        ("label", "int64", (), ("label",), None),
    ]
    found = rows(columns)
    np.testing.assert_array_equal(found["features"][:2], [[20, 0], [21, 1]])
    np.testing.assert_array_equal(found["colour"][:4], [0, 1, 1, 0])
    np.testing.assert_array_equal(found["since"][:2], [1704067200, 1704153600])
    assert found["comment"][1] == b"comment 1"
    assert dict(columns.roles) == {
        "id": "dropped (it numbers the rows)",
        "age": "input",
        "colour": "input (2 categories)",
        "member": "input (0 or 1)",
        "since": "input (seconds since 1970)",
        "comment": "input (text)",
        "label": "label (by its name)",
    }
    assert columns.notes == ()


class TestOptions:
    def test_text_and_categories(self, tmp_path):
        columns = read(tmp_path, MESSY, text="colour", categories="age,comment")
        by_name = {f.name: f for f in columns.schema.features}
        assert by_name["colour"].dtype == "string"
        assert by_name["age"].classes == tuple(str(20 + n) for n in range(40))
        assert len(by_name["comment"].classes) == 40
        assert by_name["features"].columns == ("member",)

    def test_categories_that_are_numbers_are_in_their_order(self, tmp_path):
        columns = read(tmp_path, "a,b,y\n10,1,0\n9,2,1\n,3,0\n", categories="a", missing="mask")
        assert columns.schema.of_role("input")[1].classes == ("", "9", "10")
        np.testing.assert_array_equal(rows(columns)["a"], [2, 1, 0])

    def test_an_index_that_is_asked_for_is_kept(self, tmp_path):
        columns = read(tmp_path, MESSY, inputs="id,age")
        assert columns.schema.features[0].columns == ("id", "age")
        assert dict(read(tmp_path, MESSY, drop="id").roles)["id"] == "dropped"

    @pytest.mark.parametrize("values", ["3,1,2", "0,1,2", "7,9,12"])
    @pytest.mark.parametrize("name", ["", "id", "index", "Unnamed: 0"])
    def test_an_index_is_left_out(self, tmp_path, name, values):
        lines = [f"{name},a,y", *(f"{n},5,1" for n in values.split(","))]
        assert read(tmp_path, lines).schema.features[0].columns == ("a",)

    @pytest.mark.parametrize("values", ["1,1,2", "1.5,2,3"])
    def test_what_is_no_index(self, tmp_path, values):
        lines = ["id,a,y", *(f"{n},5,1" for n in values.split(","))]
        assert read(tmp_path, lines).schema.features[0].columns == ("id", "a")

    def test_weight(self, tmp_path):
        columns = read(tmp_path, "a,w,y\n1,2,0\n2,0.5,1\n", weight="w")
        assert [f.role for f in columns.schema.features] == ["input", "label", "weight"]
        np.testing.assert_array_equal(rows(columns)["w"], [2, 0.5])

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({"weight": "colour"}, "sample weights in column 'colour' .* numbers, but found text"),
            ({"weight": "agee"}, "'agee', .* Write 'age'"),
            ({"weight": "age", "drop": "age"}, "two for age"),
            ({"text": "nowhere"}, "must have the column 'nowhere'"),
        ],
    )
    def test_what_cannot_be(self, tmp_path, asked, message):
        with pytest.raises(DataError, match=message):
            read(tmp_path, MESSY, **asked)

    def test_labels_as_they_are_written(self, tmp_path):
        lines = ["a,ok,day,z", "1,yes,2024-01-02,0", "2,no,2024-01-01,1", "3,yes,2024-01-02,1"]
        columns = read(tmp_path, lines, label="ok,day")
        assert [f.classes for f in columns.schema.of_role("label")] == [
            ("no", "yes"),
            ("2024-01-01", "2024-01-02"),
        ]

    def test_a_label_with_a_class_for_each_row_is_told(self, tmp_path):
        columns = read(tmp_path, ["n,review", *(f"{n},text {n}" for n in range(30))])
        assert "the label 'review' has 30 classes in 30 rows" in columns.notes[0]

    def test_clients_are_as_they_are_written(self, tmp_path):
        columns = read(tmp_path, "a,place,y\n1,01,0\n2,1,1\n", client="place")
        assert columns.owners.tolist() == ["01", "1"]

    def test_names_that_no_input_can_have_are_told(self, tmp_path):
        columns = read(tmp_path, "my text,größe,my_b,y\nab,1,x,0\ncd,2,y,1\n", text="my text,my_b")
        assert len(columns.notes) == 1
        assert columns.notes[0].startswith("'my text' is a name that no input of Keras can have")

    def test_whole_numbers_that_float32_rounds_are_told(self, tmp_path):
        for large in ("16777217", "-9223372036854775808", "100000000000000000001"):
            columns = read(tmp_path, f"a,b,y\n{large},0.5,0\n2,3,1\n")
            note = "whole numbers beyond 16,777,216 are rounded to float32: 'a'"
            assert columns.notes == (note,)
        columns = read(tmp_path, "a,y\n16777217,0\n0.5,1\n")
        assert columns.notes == (note,)
        columns = read(tmp_path, "a,y\n33554432,0\n0.5,1\n")  # Which float32 has.
        assert columns.notes == ()
        columns = read(tmp_path, "a,y\n1,100000000000000000000\n2,100000000000000000001\n")
        assert columns.notes == (note.replace("'a'", "'y'"),)

    def test_numbers_that_are_0_as_float32_are_told(self, tmp_path):
        note = "numbers nearer to 0 than float32 can be are 0: "
        columns = read(tmp_path, "p,b,y\n1e-50,0,0\n0.5,0.1,1\n")
        assert columns.notes == (note + "'p'",)
        assert read(tmp_path, "p,y\n1,1e-300\n2,0.5\n").notes == (note + "'y'",)

    def test_points_are_text_where_other_columns_have_decimal_commas(self, tmp_path):
        columns = read(tmp_path, "preis;menge;y\n1,50;1.000;a\n2,75;2.500;b\n")
        assert "column 'menge' is text: beside decimal commas" in " ".join(columns.notes)
        assert columns.columns["features"].tolist() == [[1.5], [2.75]]
        for role, last in (("label", "z"), ("weight", "y")):
            text = f"preis;menge;{last}\n1,50;1.000;a\n2,75;2.500;b\n"
            with pytest.raises(DataError, match=r"'menge' .*must say what its points are"):
                read(tmp_path, text, **{role: "menge"})
        with pytest.raises(DataError, match=r"'1\.000' in line 32"):
            read(tmp_path, "preis;y\n" + "1,50;a\n" * 30 + "1.000;b\n")


class TestMissing:
    LINES = ("a,b,c,y", "1,x,t 1,0", ",x,t 2,1", "5,,t 3,0", "3,x,,1", "7,x,t 5,1")

    def test_a_text_that_is_called_as_the_mask(self, tmp_path):
        lines = ["a,missing,y", "1,some words,0", ",others,1"]
        with pytest.raises(DataError, match="must be called 'missing', but found values that are"):
            read(tmp_path, lines, missing="mask", text="missing")
        columns = read(tmp_path, lines, missing="mean", text="missing")
        assert columns.block(np.arange(2))["missing"] == [b"some words", b"others"]

    def test_they_are_refused_by_column(self, tmp_path):
        with pytest.raises(DataError) as caught:
            read(tmp_path, ["a,b,y", "1,2,0", ",2,1", ",,1"])
        assert "a value in each column" in str(caught.value)
        assert "'' in line 3, column 'a' (2 missing in that column)" in str(caught.value)
        assert "'' in line 4, column 'b'" in str(caught.value)
        for way in ("missing='drop'", "missing='mean'", "missing='mask'"):
            assert way in str(caught.value)

    def test_rows_are_dropped_and_counted(self, tmp_path):
        columns = read(tmp_path, self.LINES, missing="drop")
        np.testing.assert_array_equal(rows(columns)["features"], [[1], [7]])
        assert columns.notes == (
            "3 rows are left out for missing values: 1 in 'a', 1 in 'b', 1 in 'c'",
        )

    @pytest.mark.parametrize(
        ("how", "number"), [("mean", 4), ("median", 4), (0, 0), ("-1.5", -1.5), ("mask", 0)]
    )
    def test_they_are_filled(self, tmp_path, how, number):
        columns = read(tmp_path, self.LINES, missing=how)
        found = rows(columns)
        np.testing.assert_array_equal(found["features"][:, 0], [1, number, 5, 3, 7])
        assert found["c"][3] == b""
        by_name = {f.name: f for f in columns.schema.features}
        assert by_name["b"].classes == ("", "x")
        np.testing.assert_array_equal(found["b"], [1, 1, 0, 1, 1])
        assert columns.notes[0].startswith(f"1 missing in column 'a': filled with {number:.6g}")
        if how == "mask":
            assert by_name["missing"].columns == ("a", "b", "c")
            np.testing.assert_array_equal(
                found["missing"], [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
            )
        else:
            assert "missing" not in by_name

    def test_a_mask_is_there_even_if_nothing_is_missing(self, tmp_path):
        columns = read(tmp_path, "a,y\n1,0\n2,1\n", missing="mask")
        np.testing.assert_array_equal(rows(columns)["missing"], [[0], [0]])

    def test_no_label_can_be_made_up(self, tmp_path):
        columns = read(tmp_path, "a,y\n1,0\n,1\n2,\n", missing=9)
        np.testing.assert_array_equal(rows(columns)["features"], [[1], [9]])
        assert "1 row is left out for missing values: 1 in 'y'" in columns.notes

    def test_empty_columns_are_left_out(self, tmp_path):
        columns = read(tmp_path, "a,b,y\n1,,0\n2,NA,1\n")
        assert dict(columns.roles)["b"] == "dropped (it is empty)"
        assert columns.notes == ("column 'b' has no value in any row: it is left out",)
        with pytest.raises(DataError, match=r"column 'y' .* must have values"):
            read(tmp_path, "a,y\n1,\n2,\n")
        with pytest.raises(DataError, match="an input with values"):
            read(tmp_path, "a,y\n,0\n,1\n")

    def test_nothing_to_take_a_mean_of(self, tmp_path):
        with pytest.raises(DataError, match="column 'a' must have values to take their mean"):
            read(tmp_path, "a,b,y\n1,2,\n,3,0\n,4,1\n", missing="mean")

    def test_a_way_that_there_is_not(self, tmp_path):
        with pytest.raises(OptionError, match="mean, median, mask or a number, but found 'avg'"):
            read(tmp_path, MESSY, missing="avg")


class TestBadRows:
    def test_all_complaints_at_once(self, tmp_path):
        lines = changed(3, "age", "young")
        lines[5] += ",more"
        lines[7] = changed(7, "since", "soon")[7]
        lines[9] = changed(9, "age", "")[9]
        with pytest.raises(DataError) as caught:
            read(tmp_path, lines)
        told = str(caught.value)
        for part in (
            "'young' in line 4, column 'age'",
            "8 in line 6",
            "'soon' in line 8, column 'since'",
            "'' in line 10, column 'age'",
            "skip_bad=True",
        ):
            assert part in told
        assert "\n" not in told

    def test_twenty_are_shown_and_all_are_counted(self, tmp_path):
        lines = ["a,b", *(["1,2"] * 5), *(["1"] * 30)]
        with pytest.raises(
            DataError, match=r"found 30 that do not, the first 1 in line 7;"
        ) as error:
            read(tmp_path, lines)
        assert str(error.value).count("in line") == 20

    def test_they_are_left_out_and_counted(self, tmp_path):
        lines = changed(3, "age", "young")
        lines[5] += ",more"
        columns = read(tmp_path, lines, skip_bad=True)
        assert columns.num_records == 38
        assert rows(columns)["features"][:4, 0].tolist() == [20, 21, 23, 25]
        assert "2 rows are left out as bad" in columns.notes[0]
        assert columns.left_out == {"bad row": 2}
        assert "line 4, 6" in columns.notes[0]

    @pytest.mark.parametrize("role", ["a", "y", "sample_weight"])
    def test_numbers_that_float32_cannot_hold(self, tmp_path, role):
        lines = ["a,y,sample_weight", *(f"{n}.5,{n}.5,1.5" for n in range(5)), "1,1,1"]
        number = lines[0].split(",").index(role)
        for row, value in ((2, "1e39"), (4, "-inf")):
            values = lines[row].split(",")
            values[number] = value
            lines[row] = ",".join(values)
        with pytest.raises(DataError) as caught:
            read(tmp_path, lines)
        assert f"'1e+39, beyond float32' in line 3, column '{role}'" in str(caught.value)
        assert f"'-inf, beyond float32' in line 5, column '{role}'" in str(caught.value)
        assert rows(read(tmp_path, lines, skip_bad=True))["features"].tolist() == [
            [0.5],
            [2.5],
            [4.5],
            [1],
        ]

    def test_nothing_is_left(self, tmp_path):
        with pytest.raises(DataError, match="1 in line 2"):
            read(tmp_path, "a,b\n1\n", skip_bad=True)


def test_options_of_tables_go_with_tables(tmp_path):
    for asked in ({"text": "a"}, {"categories": "a"}, {"missing": "drop"}):
        with pytest.raises(DataError, match="text, categories and missing must go with a table"):
            read_raw("digits", Asked(**asked))
    with pytest.raises(DataError, match=r"must go with a table or a \.npz file"):
        read_raw("digits", Asked(weight="a"))


def test_an_index_that_numbers_nothing_is_a_column(tmp_path):
    prices = [100 + n * n for n in range(12)]
    columns = read(tmp_path, ["a,Index", *(f"{n}.5,{price}" for n, price in enumerate(prices))])
    np.testing.assert_array_equal(rows(columns)["label"], prices)
    lines = ["a,y,index", *(f"{n}.5,{n % 2},{price}" for n, price in enumerate(prices))]
    assert dict(read(tmp_path, lines).roles)["index"] == "dropped (it numbers the rows)"
    for index, is_told in ((range(12), False), (prices, True)):
        lines = ["Index,a,y", *(f"{number},{n}.5,{n % 2}" for n, number in enumerate(index))]
        columns = read(tmp_path, lines)
        assert dict(columns.roles)["Index"] == "dropped (it numbers the rows)"
        assert any("'Index' is left out" in note for note in columns.notes) == is_told


def test_a_date_is_filled_with_what_is_told(tmp_path):
    lines = ["d,y", "2024-01-01,0", ",1", "2024-01-03,1"]
    columns = read(tmp_path, lines, missing=-1.5)
    assert rows(columns)["d"][1] == -1
    assert "1 missing in column 'd': filled with -1" in columns.notes


def test_words_are_no_months(tmp_path):
    words = ["Decanter 3 2018", "Decanter 4 2018", "3 marraskuu 2020", "Sept 5, 2020"] * 9
    columns = read(tmp_path, ["d,y", *(f'"{word}",{n % 2}' for n, word in enumerate(words))])
    assert dict(columns.roles)["d"] == "input (4 categories)"
    months = ["Dec 3 2018", "3 december 2018", "Sept 5, 2020", "1-May-2020"] * 9
    columns = read(tmp_path, ["d,y", *(f'"{word}",{n % 2}' for n, word in enumerate(months))])
    assert rows(columns)["d"][:2].tolist() == [1543795200, 1543795200]


def test_text_that_counts_records_is_shown_as_it_is(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": ["record 99999"], "y": "u"}\n{"a": [1], "y": "v"}\n')
    with pytest.raises(DataError, match=r"'record 99999' in line 1"):
        read_raw(path, Asked())
