"""Features found in Examples of any writer, against those that protobuf itself wrote."""

from __future__ import annotations

import random

import pytest
from records_of_others import example, sequence_example

from tfdist.records.format.examples import (
    NoMessageError,
    Values,
    count,
    features_of,
    floats,
    integers,
    strings,
)


def everything(key):
    return True


def values(record, found: Values):
    if found.kind == "bytes":
        return [record[start:stop] for start, stop in strings(record, found)]
    return integers(record, found) if found.kind == "int64" else floats(record, found)


def test_each_kind_of_list_is_found_with_its_values():
    ids = [0, 127, 128, -1, 1 << 62, -(1 << 63)]
    record = example(ids=ids, x=[0.5, -2.0], text=[b"a", b"", b"b" * 300], empty=[], one=7)
    found, lists = features_of(record, everything)
    assert {key: values(record, item) for key, item in found.items()} == {
        b"ids": ids, b"x": [0.5, -2.0], b"text": [b"a", b"", b"b" * 300], b"one": [7],
        b"empty": [],
    }  # fmt: skip
    assert [count(record, found[key]) for key in (b"ids", b"x", b"text", b"one")] == [6, 2, 3, 1]
    assert lists == {}
    assert list(features_of(record, {b"x"}.__contains__)[0]) == [b"x"]


def test_lists_that_are_not_packed_count_as_well():
    def field(number, payload):
        return bytes([number << 3 | 2, len(payload)]) + payload

    def record(kind, numbers):
        return field(1, field(1, field(1, b"k") + field(2, field(kind, numbers))))

    whole = record(3, b"\x08\x05\x08\x80\x01")
    single = record(2, b"\x0d\0\0\0\x3f\x0d\0\0\x80\x3f")
    for written, expected in ((whole, [5, 128]), (single, [0.5, 1.0])):
        found = features_of(written, everything)[0][b"k"]
        assert (values(written, found), count(written, found)) == (expected, 2)


def test_feature_lists_of_sequence_examples():
    record = sequence_example({"id": b"r"}, {"x": [[0.5, 1.0], [2.0, 3.0]], "none": []})
    found, lists = features_of(record, everything)
    assert values(record, found[b"id"]) == [b"r"]
    assert [values(record, step) for step in lists[b"x"]] == [[0.5, 1.0], [2.0, 3.0]]
    assert lists[b"none"] == []


def test_what_is_no_example_is_refused_and_nothing_else_is_raised():
    whole = example(ids=[1, 300], x=[0.5], text=b"some text")
    rng = random.Random(0)
    refused = 0
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        damaged = bytes(damaged[: rng.choice([len(whole), rng.randrange(len(whole))])])
        try:
            found, _ = features_of(damaged, everything)
            for item in found.values():
                count(damaged, item)
                values(damaged, item)
        except NoMessageError:
            refused += 1
    assert refused > 1000
    with pytest.raises(NoMessageError):
        features_of(whole[:-3], everything)
