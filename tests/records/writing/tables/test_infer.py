"""What a column of text is taken for, and what is told of it."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pytest

from tfdist.errors import DataError
from tfdist.records.writing.tables.infer import infer
from tfdist.records.writing.tables.table import Values, Written


def kind(*texts, comma=False):
    cells = infer(Written(texts, decimal_comma=comma))
    return cells.kind, cells.values.tolist()


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("1", " 2 ", "-3"), ("integer", [1, 2, -3])),
        (("9007199254740993", "1"), ("integer", [9007199254740993, 1])),
        (("1", "2.0"), ("number", [1, 2])),
        (("1e3", "inf"), ("number", [1000, np.inf])),
        (("18446744073709551616", "1"), ("number", [2.0**64, 1])),
        (("1", "", "3"), ("integer", [1, 0, 3])),
        (("1.5", "NaN", "n/a"), ("number", [1.5, 0, 0])),
        (("1_000", "2"), ("text", ["1_000", "2"])),
        (("true", "False", "YES", "no"), ("boolean", [True, False, True, False])),
        (("a", "b "), ("text", ["a", "b "])),
        (("1,5", "2"), ("text", ["1,5", "2"])),
        (("", "NA"), ("empty", ["", "NA"])),
    ],
)
def test_numbers_and_truth_values(texts, expected):
    assert kind(*texts) == expected


def test_numbers_that_look_like_codes_are_told():
    written = (("01234", "7"), ("01234", "7", ""), ("01234", "7", "1.5"), ("+01234", "7"))
    for texts in (*written, (" 01234", "7")):
        cells = infer(Written(texts))
        assert cells.values.tolist()[:2] == [1234, 7]
        assert "begin with 0, which is lost" in cells.notes[0]
    assert infer(Written(("0", "7"))).notes == infer(Written(("0.5", "7"))).notes == ()


def test_decimal_commas():
    assert kind("1,5", "2", ",5", "-1,25e2", comma=True) == ("number", [1.5, 2, 0.5, -125])
    assert kind("1.234,5", "2", comma=True)[0] == "text"
    assert kind("0.125", "1.5", "2,5", comma=True) == ("number", [0.125, 1.5, 2.5])
    assert kind("1.000", "2.000", comma=True) == ("number", [1, 2])


def test_points_that_may_mark_thousands_are_told():
    for texts in (["1.000", "2.500"], ["1.000", "19"]):
        (note,) = infer(Written(texts, decimal_comma=True)).notes
        assert note.startswith("has points before three digits alone, so that '1.000' is read as 1")
    for texts in (["1.000", "0.5"], ["0.125", "0.250"], ["1", "2"]):
        assert infer(Written(texts, decimal_comma=True)).notes == ()
    assert infer(Written(["1.000", "2.500"])).notes == ()
    cells = infer(Written([*["5"] * 30, "1.234.567"], decimal_comma=True))
    assert (cells.bad, cells.notes) == ({30: "1.234.567"}, ())


def test_a_point_beside_decimal_commas_may_mark_thousands():
    cells = infer(Written(["1,5"] * 30 + ["1.000"], decimal_comma=True))
    assert (cells.kind, cells.bad) == ("number", {30: "1.000"})
    assert cells.notes == ("has decimal commas",)


@pytest.mark.parametrize(
    ("texts", "seconds"),
    [
        (("1970-01-02", "1969-12-31"), [86400, -86400]),
        (("2024-02-29T12:00:00Z", "2024-02-29 12:00:01"), [1709208000, 1709208001]),
        (("2024-02-29 12:00+02:00", "2024-02-29 12:00 -0130"), [1709200800, 1709213400]),
        (("0001-01-01", "2024-2-29"), [-62135596800, 1709164800]),
        (("1970/1/2", "02.01.1970", "2 Jan 1970", "January 2, 1970"), [86400] * 4),
        (("13/01/1970", "01/02/1970"), [12 * 86400, 31 * 86400]),
        (("01/13/1970", "02/01/1970"), [12 * 86400, 31 * 86400]),
    ],
)
def test_dates(texts, seconds):
    assert kind(*texts) == ("date", seconds)


def test_what_is_cut_off_a_date_is_told():
    cells = infer(Written(("1969-12-31 23:59:58.5", "1970-01-01 00:00:00.000")))
    assert cells.values.tolist() == [-2, 0]
    assert cells.notes == ("has fractions of seconds, which are cut off",)


def test_days_and_months_that_cannot_be_told_apart_stay_text():
    cells = infer(Written(("01/02/2024", "03/04/2024")))
    assert cells.kind == "text"
    assert "cannot be told apart" in cells.notes[0]


@pytest.mark.parametrize(
    "texts",
    [
        ("2024-02-30", "x"),
        ("31.04.2024", "x"),
        ("1 Foo 2024", "x"),
        ("1000-1-1", "1000-1-2"),  # Numbers of parts.
        ("2024-02-29 12:00+99:99", "x"),
    ],
)
def test_no_dates(texts):
    assert kind(*texts)[0] == "text"


def test_a_column_is_of_a_kind_that_95_percent_of_it_have():
    numbers = [str(n) for n in range(19)]
    cells = infer(Written([*numbers, "x"]))
    assert (cells.kind, cells.bad) == ("integer", {19: "x"})
    # What is missing counts for neither.
    cells = infer(Written([*numbers, "", "x"]))
    assert (cells.kind, cells.bad) == ("integer", {20: "x"})
    cells = infer(Written([*numbers, "x", "y"]))
    assert (cells.kind, cells.bad) == ("text", {})
    assert cells.notes == ("is text, though 90% of its values are numbers: one is 'x'",)


@pytest.mark.parametrize("odd", ["1,234.50", "-12,345", "1.234.567,8", "1 234,5"])
def test_marks_between_thousands_are_told(odd):
    (note,) = infer(Written([odd, odd, "7"])).notes
    assert note.startswith(f"is text, though values such as '{odd}' are numbers with marks")
    (note,) = infer(Written(["1,25", "0,5", "7"])).notes
    assert note.startswith("is text, though values such as '1,25' are numbers with decimal commas")
    assert infer(Written(["1,2", "192.168.100.200", "1,23,4"])).notes == ()


def test_text_by_order_keeps_words_for_nothing():
    cells = infer(Written(("NA", "", "None", "1")), is_text=True)
    assert (cells.kind, cells.missing.tolist()) == ("text", [False, True, False, False])
    assert infer(Written(("NA", "x", "", "y"))).missing.tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, None, 3], ("integer", [1, 0, 3])),
        ([1, 2.5, float("nan")], ("number", [1, 2.5, 0])),
        ([2**63, 1], ("number", [2.0**63, 1])),
        ([True, None], ("boolean", [True, False])),
        ([Decimal("1.5"), Decimal(2)], ("number", [1.5, 2])),
        (["a", None], ("text", ["a", ""])),
        (["1", "2"], ("text", ["1", "2"])),
        (["1970-01-02", "1970-01-01"], ("date", [86400, 0])),
        ([datetime.date(1970, 1, 2), datetime.datetime(1969, 12, 31)], ("date", [86400, -86400])),
        ([[1], None], ("lists", [[1], []])),
        ([None, None], ("empty", [None, None])),
    ],
)
def test_values_of_python(values, expected):
    cells = infer(Values(values))
    assert (cells.kind, cells.values.tolist()) == expected


@pytest.mark.parametrize(
    "values",
    [[1, -(2**63), 2**63 - 1], [1, 2.5, 2**53 + 1], [1.5, float("nan")], [2**64, 1], [2**64, 0.5]],
)
def test_numbers_alone_are_as_those_of_numpy(values):
    """The quick way has the result of the other, which numbers of NumPy take."""
    quick = infer(Values(values))
    slow = infer(Values([np.float64(v) if isinstance(v, float) else v for v in values] + [None]))
    assert quick.kind == slow.kind
    assert quick.values.dtype == slow.values.dtype
    assert quick.values.tolist() == slow.values.tolist()[:-1]
    assert quick.missing.tolist() == slow.missing.tolist()[:-1]


def test_values_that_are_of_no_kind():
    with pytest.raises(DataError, match="found a dict"):
        infer(Values([{"a": 1}]))
    assert infer(Values([1, "x", None]), is_text=True).values.tolist() == ["1", "x", ""]
