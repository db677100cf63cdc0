"""CSV and TSV: separators, encodings, headers, and rows that are not whole."""

from __future__ import annotations

import csv
import gzip
from random import Random

import numpy as np
import pytest

from tfdist.errors import DataError
from tfdist.records.writing.tables import delimited
from tfdist.records.writing.tables.delimited import read_delimited
from tfdist.records.writing.tables.infer import infer


def texts(table):
    return {name: list(column.texts) for name, column in table.columns.items()}


def read(tmp_path, text, name="t.csv", encoding="utf-8"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return read_delimited(path, "tsv" if name.startswith("t.tsv") else "csv")


@pytest.mark.parametrize(
    ("text", "separator"),
    [
        ("a,b\n1,2\n3,4\n", None),
        ("a;b\n1;2\n3;4\n", "semicolons"),
        ("a\tb\n1\t2\n3\t4\n", "tabs"),
        ("a|b\n1|2\n3|4\n", "bars"),
        ('"a";"b"\r\n"1";"2"\r\n3;4\r\n', "semicolons"),
        ("sep=;\r\na;b\r\n1;2\r\n3;4\r\n", "semicolons"),
    ],
)
def test_separators(tmp_path, text, separator):
    table = read(tmp_path, text)
    assert texts(table) == {"a": ["1", "3"], "b": ["2", "4"]}
    assert [separator in note for note in table.notes] == ([True] if separator else [])


def test_the_separator_is_the_one_that_most_rows_agree_on(tmp_path):
    # Each has a comma in its header; the texts have commas as they like.
    table = read(tmp_path, "text, as is;b\nno;1\na, b;2\na, b, c;3\n")
    assert texts(table)["b"] == ["1", "2", "3"]
    assert table.columns["b"].decimal_comma


@pytest.mark.parametrize(
    ("text", "kinds", "has_commas"),
    [
        ("a\tb\n2,50\t3.000\n1,25\t4.000\n", ["number", "number"], [True, False]),
        ("a|b\n0,125|x\n3,500|y\n", ["number", "text"], [True, False]),
        ('a\tb\r\n1\t"12,5"\r\n2\t"2,5"\r\n', ["integer", "number"], [False, True]),
        ("a\tb\n1,234\t3.000\n5,678\t4.000\n", ["text", "number"], [False, False]),
        ("a\tb\n1,2,3\tx, 2\n5,6,7\ty, 12\n", ["text", "text"], [False, False]),
    ],
)
def test_commas_between_tabs_and_bars_are_decimal_where_none_can_mark_thousands(
    tmp_path, text, kinds, has_commas
):
    columns = [infer(column) for column in read(tmp_path, text).columns.values()]
    assert [cells.kind for cells in columns] == kinds
    assert ["has decimal commas" in cells.notes for cells in columns] == has_commas


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_header_among_the_rows_is_told(tmp_path, quote):
    header = f"{quote}word{quote},{quote}means{quote}"
    table = read(tmp_path, f"{header}\r\nred,rot\r\n{header}\r\nword,wort\r\n")
    assert texts(table) == {"word": ["red", "word"], "means": ["rot", "wort"]}
    assert [(bad.line, bad.what) for bad in table.bad] == [(3, "the header")]
    joined = read(tmp_path, "word,means\nred,rot\n\ufeffword, means\n")
    assert [bad.line for bad in joined.bad] == [3]
    # A column alone may have its name for a word.
    assert texts(read(tmp_path, "word\nred\nword\n")) == {"word": ["red", "word"]}


def test_a_quote_that_nothing_closes_is_told_where_it_opens(tmp_path):
    rows = "".join(f"{number},x,0\n" for number in range(20))
    with pytest.raises(DataError, match=r"a quote that nothing closes, in the row .* in line 3"):
        read(tmp_path, f'a,b,y\n1,x,0\n1,"oops,0\n{rows}')
    with pytest.raises(DataError, match=r"a quote that nothing closes, in the row .* in line 1"):
        read(tmp_path, f'a,"b,y\n{rows}')


@pytest.mark.parametrize(
    ("header", "is_told"),
    [
        ("39,State-gov,77516", True),
        ("1,name0,M", True),
        ("a,Private,b", True),  # The name of a column among its values.
        ("0,1,label", False),
        ("name,2019,2020", False),
        ("name,2020", False),
        (",0", False),
    ],
)
def test_numbers_among_the_names_are_told(tmp_path, header, is_told):
    row = ",".join(["38", "Private", "215646"][: header.count(",") + 1])
    notes = read(tmp_path, f"{header}\n{row}\n").notes
    assert any("is taken for the names" in note for note in notes) == is_told


@pytest.mark.parametrize(
    ("header", "row", "names"),
    [
        ("Preis, EUR;Klasse", "1,50;A", ["Preis, EUR", "Klasse"]),
        ("Preis, EUR;Menge, kg", "1,50;2,5", ["Preis, EUR", "Menge, kg"]),
        ("Name, Vorname|Ort, Land|y", "Meier, A|Bonn, DE|A", ["Name, Vorname", "Ort, Land", "y"]),
        ("id,lat;lon,y", "1,5.0;3.1,0", ["id", "lat;lon", "y"]),
        ("a, b, c", "1, 2, 3", ["a", "b", "c"]),
        ("id, lat;lon, y", "1, 5.0;3.1, 0", ["id", "lat;lon", "y"]),
        ("title|sub,y", "a|b,1", ["title|sub", "y"]),
        ("a, b, c|d", "1, 2, x|y", ["a", "b", "c|d"]),
    ],
)
def test_commas_as_in_prose_separate_nothing(tmp_path, header, row, names):
    table = read(tmp_path, f"{header}\n" + f"{row}\n" * 3)
    assert list(table.names) == names


def test_quotes_behind_a_space_are_no_part_of_a_value(tmp_path):
    table = read(tmp_path, '"txt", "n", "y"\n"a, b", "2",   "A"\nc, 3, B\n')
    assert texts(table) == {"txt": ["a, b", "c"], "n": ["2", "3"], "y": ["A", "B"]}
    table = read(tmp_path, '"a", "b"\n1, "Hello" she said\n2, x\n')
    assert texts(table)['"b"'] == [' "Hello" she said', " x"]


def test_a_tsv_may_hold_commas(tmp_path):
    table = read(tmp_path, "a,b\tc\n1,2\t3\n", "t.tsv")
    assert (texts(table), table.notes) == ({"a,b": ["1,2"], "c": ["3"]}, ())


def test_gz(tmp_path):
    assert texts(read(tmp_path, gzip.compress(b"a,b\n1,2\n"), "t.csv.gz")) == {
        "a": ["1"],
        "b": ["2"],
    }
    with pytest.raises(DataError, match="must be readable"):
        read(tmp_path, b"a,b\n1,2\n", "t.csv.gz")


@pytest.mark.parametrize(
    ("encoding", "note"),
    [
        ("utf-8", None),
        ("utf-8-sig", None),
        ("utf-16", None),
        ("utf-32", None),
        ("cp1252", "cp1252"),
    ],
)
def test_encodings(tmp_path, encoding, note):
    table = read(tmp_path, "größe,b\nfünf €,2\n", encoding=encoding)
    assert texts(table) == {"größe": ["fünf €"], "b": ["2"]}
    assert [note in said for said in table.notes] == ([True] if note else [])


def test_bytes_of_no_encoding_are_latin_1(tmp_path):
    table = read(tmp_path, b"a,b\n\x81\xe9,2\n")
    assert texts(table)["a"] == ["\x81é"]
    assert "Latin-1" in table.notes[0]


def test_rows_that_are_not_whole_are_counted_with_their_lines(tmp_path):
    table = read(tmp_path, 'a,b\n1,2\n3\n\n"x\ny",4\n5,6,7\n8,9\n')
    assert texts(table)["b"] == ["2", "4", "9"]
    np.testing.assert_array_equal(table.lines, [2, 6, 8])
    assert [(item.line, item.what) for item in table.bad] == [(3, "1"), (7, "3")]


def test_names_that_pandas_has_counted(tmp_path):
    assert read(tmp_path, ",0,1,2\n0,5.1,3,0\n").names == ("Unnamed: 0", "0", "1", "2")


def test_a_first_row_that_may_be_no_header_is_told(tmp_path):
    (note,) = read(tmp_path, "5.1,3.5,setosa\n4.9,3.0,setosa\n").notes
    assert "is taken for the names of its columns, one of which is 5.1" in note
    assert read(tmp_path, "2019,2020,kind\n4.9,3.0,a\n").notes == ()


def test_a_text_of_a_megabyte(tmp_path):
    limit = csv.field_size_limit()
    table = read(tmp_path, f"a,b\n{'x' * 1_000_000},2\n")
    assert len(texts(table)["a"][0]) == 1_000_000
    assert csv.field_size_limit() == limit


def test_the_first_column_may_have_no_name(tmp_path):
    assert list(texts(read(tmp_path, ",a\n0,1\n"))) == ["Unnamed: 0", "a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty line"),
        ("a,a\n1,2\n", "each once, but found a, a"),
        ("a,,b\n1,2,3\n", "must name each column"),
        ("a,b\n", "rows below its header"),
        ("5.1,3,0\n4.9,2,1\n", "name each column, but found numbers alone: 5.1, 3, 0"),
        ('a,b\n"1,2\n', "comma-separated table, but found an error: a quote that nothing closes"),
        ('a;b\n1;2\n"1;2\n', "semicolon-separated"),
        (b"a,b\n\0,2\n", "must be text, but found bytes of value 0"),
        (b"\xff\xfea", "must be text"),
        ("# of May\na,b\n1,2\n", "found a comment, # of May. Remove the lines .*, here 1"),
        ("# a\n# of\na,b\n1,2\n", "found a comment, # a. Remove the lines .*, here 2"),
    ],
)
def test_no_tables(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, text)


def test_names_and_rows_may_begin_with_a_hash(tmp_path):
    assert texts(read(tmp_path, "#a,b\n#1,2\n3,4\n")) == {"#a": ["#1", "3"], "b": ["2", "4"]}


#: What a cell may hold: numbers in the ways that are written, what is missing, and no numbers.
_CELLS = ["1", "2.5", "007", "+5", "1e400", "nan", "NA", "", " 4", "1_0", "1,5", "x", "９", "0x1F"]
_CELLS += ["9007199254740993", "99999999999999999999", "1.0", "inf", "\u00a05", "-0", "é"]
_QUOTED = ['"2"', '""', '"a""b"', '"a;b"', '"x"y', 'a"b', '"a\nb"', '" "x', '"']


def _random_table(random):
    columns = [random.sample(_CELLS, random.randint(1, 3)) for _ in range(random.randint(1, 4))]
    rows = [[random.choice(of) for of in columns] for _ in range(random.randint(0, 5))]
    if rows and random.random() < 0.5:
        random.choice(rows)[0] = random.choice(_QUOTED)
    if rows and random.random() < 0.1:
        random.choice(rows).append("1")
    lines = [";".join(f"c{n}" for n in range(len(columns))), *map(";".join, rows)]
    if random.random() < 0.1:
        lines.insert(random.randint(1, len(lines)), "")
    return random.choice(["\n", "\r\n"]).join(lines) + random.choice(["", "\n"])


def test_what_pyarrow_parses_is_what_the_csv_module_reads(tmp_path, monkeypatch):
    quickly, used = delimited.parse_plain, []

    def result(text, parse):
        monkeypatch.setattr(delimited, "parse_plain", parse)
        try:
            table = read(tmp_path, text)
        except DataError as error:
            return str(error)
        cells = {
            (name, is_text): infer(column, is_text=is_text)
            for name, column in table.columns.items()
            for is_text in (False, True)
        }
        values = {
            key: (of.kind, of.values.dtype, [*map(repr, of.values.tolist())], of.missing.tolist())
            for key, of in cells.items()
        }
        told = [(of.bad, of.notes) for of in cells.values()]
        return texts(table), table.lines.tolist(), table.bad, table.notes, values, told

    def counted(*given):
        used.append(quickly(*given))
        return used[-1]

    random = Random(7)
    for _ in range(400):
        text = _random_table(random)
        assert result(text, counted) == result(text, lambda *_: None), text
    assert 0.3 < sum(found is not None for found in used) / len(used) < 0.9
