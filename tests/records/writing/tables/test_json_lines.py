"""JSON lines: objects as rows."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from tfdist.errors import DataError
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.roles import Asked
from tfdist.records.writing.tables.json_lines import read_json_lines

LINES = """{"text": "a\\u2028b", "n": 1, "ok": true, "tokens": [1, 2, 3], "label": "x"}

{"text": "", "n": 2.5, "ok": false, "tokens": [4], "label": "y"}
{"n": 3, "label": "x", "text": "12", "ok": true, "tokens": []}
"""


def write(tmp_path, text, name="t.jsonl"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_each_type_keeps_its_meaning(tmp_path):
    columns = read_raw(write(tmp_path, LINES))
    rows = columns.block(np.arange(3))
    assert {f.name: (f.dtype, f.shape) for f in columns.schema.features} == {
        "features": ("float32", (2,)),
        "text": ("string", ()),
        "tokens": ("int64", (None,)),
        "label": ("int64", ()),
    }
    np.testing.assert_array_equal(rows["features"], [[1, 1], [2.5, 0], [3, 1]])
    # A text that is there is no missing one, and one that looks like a number stays text.
    assert rows["text"] == ["a\u2028b".encode(), b"", b"12"]
    assert [row.tolist() for row in rows["tokens"]] == [[1, 2, 3], [4], []]
    np.testing.assert_array_equal(rows["label"], [0, 1, 0])
    assert columns.kind == "jsonl"


def test_gz_and_the_other_name(tmp_path):
    packed = write(tmp_path, gzip.compress(b'{"a": 1, "y": 0}\n{"a": 2, "y": 1}'), "t.ndjson.gz")
    np.testing.assert_array_equal(read_raw(packed).block(np.arange(2))["features"], [[1], [2]])


def test_all_bad_lines_are_told_at_once(tmp_path):
    lines = '{"a": 1, "y": 0}\n[1]\n{"a": 2, "y": 1}\n{"a": }\n{"a": 3, "y": 1}\n'
    path = write(tmp_path, lines)
    with pytest.raises(DataError, match=r"a JSON object, but found \[1\] in line 2; .* in line 4"):
        read_raw(path)
    columns = read_raw(path, Asked(skip_bad=True))
    np.testing.assert_array_equal(columns.block(np.arange(3))["features"], [[1], [2], [3]])
    assert [n for n in columns.notes if "2 rows are left out as bad" in n and "line 2, 4" in n]


def test_a_key_that_comes_twice_is_told(tmp_path):
    path = write(tmp_path, '{"a": 1, "y": 0}\n{"a": 2, "a": 3, "y": 1}\n{"u": {"b": 1, "b": 2}}\n')
    with pytest.raises(DataError, match=r"each key once, but found 'a' twice in line 2; 'b' twice"):
        read_raw(path)


def test_values_that_are_not_of_one_kind_within_a_list(tmp_path):
    for value, odd in (
        ('[1, "s"]', "text beside numbers: 's' in line 1, 1 in line 1"),
        ("[2, null]", "NoneType None in line 1"),
    ):
        path = write(tmp_path, f'{{"a": {value}, "y": 0}}\n' * 3)
        with pytest.raises(DataError, match=f"must hold numbers, or text, .* but found {odd}"):
            read_raw(path)


def test_a_list_that_is_not_as_the_others_is_named_by_its_line(tmp_path):
    path = write(tmp_path, '{"a": [1], "y": 0}\n\n{"a": ["s", "t"], "y": 1}\n')
    with pytest.raises(DataError, match=rf"{path}: .* found \['s', 't'\] in line 3 where"):
        read_raw(path)


def test_a_whole_number_of_hundreds_of_digits(tmp_path):
    path = write(tmp_path, f'{{"a": -{10**400}, "y": 0}}\n{{"a": 1, "y": 1}}\n')
    with pytest.raises(DataError, match="'-inf, beyond float32' in line 1, column 'a'"):
        read_raw(path)


def test_a_key_that_an_object_lacks_is_missing(tmp_path):
    path = write(tmp_path, '{"a": 1, "y": 0}\n{"y": 1}\n{"a": null, "y": 1}\n')
    with pytest.raises(DataError, match=r"no value in line 2, column 'a' \(2 missing"):
        read_raw(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\n", "a JSON object in each line, but found none"),
        ('[\n{"a": 1},\n{"a": 2}\n]', "found one array of 2 objects. Save it as JSON lines"),
        ('{"a": [{"b": 1}], "y": 0}\n', "array 'a' must hold numbers, .* found dict"),
        (
            '{"a": [1], "y": 0}\n{"a": 2, "y": 1}\n',
            "lists in column 'a', but found '2' in line 2, column 'a'",
        ),
        (
            '{"a": "\\ud83d", "y": 0}\n{"a": "\\ud83d\\ude00", "y": 1}',
            r"half a letter .* in line 1\. Mend",
        ),
        ("[1]\n[2]\n", r"\[1\] in line 1; \[2\] in line 2"),
    ],
)
def test_what_cannot_be_read(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read_raw(write(tmp_path, text))


def test_values_of_several_kinds_become_text(tmp_path):
    lines = "".join(
        f'{{"a": {"1" if n % 2 else chr(34) + "x" + chr(34)}, "y": 0}}\n' for n in range(6)
    )
    columns = read_raw(write(tmp_path, lines), Asked(text="a"))
    assert columns.block(np.arange(2))["a"] == [b"x", b"1"]
    noted = read_raw(write(tmp_path, lines))
    assert any("text, as it has values of several kinds: text, integer" in n for n in noted.notes)


def test_lines_are_those_of_the_file(tmp_path):
    table = read_json_lines(write(tmp_path, LINES))
    np.testing.assert_array_equal(table.lines, [1, 3, 4])


def test_labels_in_lists_of_unequal_lengths(tmp_path):
    rows = ['{{"x": {0}, "label": [0, 2]}}', '{{"x": {0}, "label": [1]}}']
    tags = write(tmp_path, "\n".join(row.format("1.5") for row in rows))
    with pytest.raises(DataError, match=r"the label 'label' .* lists of 1 to 2 values"):
        read_raw(tags)
    entries = write(tmp_path, "\n".join(row.format("[1, 2]") for row in rows))
    assert read_raw(entries).schema.features[1].shape == (None,)


def test_objects_within_objects_are_columns_called_by_their_paths(tmp_path):
    rows = [{"user": {"age": n, "at": {"x": n / 2}}, "y": n % 2} for n in range(4)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    columns = read_raw(path, Asked(label="y"))
    assert columns.schema.features[0].columns == ("user.age", "user.at.x")
    features = columns.block(np.arange(4))["features"]
    np.testing.assert_array_equal(features, [[n, n / 2] for n in range(4)])
    assert any("columns of their own: user.age, user.at.x" in note for note in columns.notes)
    path.write_text('{"user": {}, "x": 2, "y": 1}\n')
    assert read_raw(path, Asked(label="y")).notes == ()
    path.write_text('{"user": {"age": 1}, "user.age": 2, "y": 1}\n')
    with pytest.raises(DataError, match=r"each key once, but found 'user\.age' twice in line 1"):
        read_raw(path, Asked(label="y"))
