"""Tables that are too large to be held: the same records, notes and errors as of those that are."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import resource

import numpy as np
import pyarrow
import pytest
from pyarrow import csv, parquet

from tfdist import records
from tfdist.errors import DataError
from tfdist.records.format import large_arrays
from tfdist.records.format.large_arrays import LargeArray, Store
from tfdist.records.writing import text_files
from tfdist.records.writing.as_trained import write_as_trained
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.roles import Asked
from tfdist.records.writing.tables import json_lines, typed
from tfdist.records.writing.tables.files import read_table


@pytest.fixture
def as_large(monkeypatch):
    """Makes every table large from when it is called: some 20 rows are read at a time."""

    def make(block_bytes: int = 400) -> None:
        monkeypatch.setattr(text_files, "LARGE_BYTES", -1)
        monkeypatch.setattr(typed, "LARGE_BYTES", -1)
        monkeypatch.setattr(text_files, "_BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(large_arrays, "_VALUES_AT_ONCE", 30)

    return make


def made(header, *columns, separator=",", end="\n", rows=240):
    """Returns a table of text; each column is a function of the number of a row."""
    lines = [header, *(separator.join(c(row) for c in columns) for row in range(rows))]
    return end.join([*lines, ""])


def number(row):
    return f"{row * 0.37:.3f}"


def word(row):
    return ("red", "green ", " blue")[row % 3]


def label(row):
    return "yn"[row % 2]


def gaps(row):
    return ("NA", "", "7", "2.5")[row % 4]


def name(row):
    return "NA" if row == 5 else f"name {row}"


def rarely(row):
    return f"text {row}" if row % 3 == 0 else ""


def quoted(row):
    return f'"{name(row)}, first"' if row % 7 else f'"two ""lines""\nof {row}"'


def seconds(row):
    return f"2024-03-{row % 28 + 1:02d} 12:00:{row % 60:02d}.{row % 3}"


def day(row):
    return f"{row % 28 + 1:02d}/{row % 12 + 1:02d}/2024"


def unclear_day(row):
    return f"{row % 12 + 1:02d}/{row % 12 + 1:02d}/2024"


def nearly(row):
    return "x" if row % 40 == 39 else str(row)


CASES = {
    "numbers": (made("a,b,y", number, str, number), {}),
    "whole numbers and codes": (made("a,zip,y", str, lambda n: f"{n:05d}", label), {}),
    "a point in the last rows": (made("a,y", lambda n: str(n) if n < 230 else "1.0", label), {}),
    "zeros below nothing": (made("a,y", lambda n: "-0" if n < 200 else f"{n}.5", label), {}),
    "beyond int64": (made("a,y", lambda n: str(10**20 + n), label), {}),
    "categories and text": (
        made("a,b,c,y", number, word, quoted, label),
        {"categories": "b"},
    ),
    "filled": (made("a,b,t,y", number, gaps, name, label), {"missing": "median"}),
    "text by order": (
        made("a,b,t,y", number, gaps, name, label),
        {"missing": "mean", "text": "b,t", "drop": "a"},
    ),
    "left out": (made("a,b,c,y", number, gaps, name, label), {"missing": "drop"}),
    "masked": (made("a,b,c,y", number, gaps, word, label), {"missing": "mask"}),
    "bad values": (made("a,b,y", number, nearly, label), {"skip_bad": True}),
    "bad values that are told": (made("a,b,y", number, nearly, label), {}),
    "missing values that are told": (made("a,b,c,y", number, gaps, name, label), {}),
    "rows that are not whole": (
        made("a,b,y", number, lambda n: "1" if n % 50 else "1,2", label),
        {"skip_bad": True},
    ),
    "the header again": (
        made("a,b,y", lambda n: "a,b,y\n1" if n == 100 else number(n), number, label),
        {"skip_bad": True},
    ),
    "blank lines": (made("a,y", lambda n: "\n\n5" if n % 60 == 59 else str(n), label), {}),
    "times": (made("when,day,a,y", seconds, day, number, label), {}),
    "days that are unclear and gaps": (
        made("day,a,y", lambda n: unclear_day(n) if n > 80 else "", number, label),
        {"missing": "drop"},
    ),
    "a mark within": (made("a,y", lambda n: f"\ufeff{n}" if n % 9 == 0 else str(n), label), {}),
    "a header of Unix": ("a,y\n" + made("1,y", str, label, end="\r")[4:], {}),
    "days that are unclear": (made("day,a,y", unclear_day, number, label), {}),
    "truth values": (made("ok,a,y", lambda n: ("yes", "no")[n % 2], number, label), {}),
    "dates are the label": (made("a,y", number, day), {}),
    "weights and clients": (
        made("a,w,who,y", number, number, word, label),
        {"weight": "w", "client": "who"},
    ),
    "an index": (made("id,a,y", str, number, label), {}),
    "decimal commas": (
        made("a;b;y", lambda n: f"{n},5", lambda n: f"{n % 9 + 1}.000", label, separator=";"),
        {},
    ),
    "commas between tabs": (made("a\tb\ty", lambda n: f"{n},5", number, label, separator="\t"), {}),
    "lines of Windows": (made("sep=;\r\na;b;y", str, quoted, label, separator=";", end="\r\n"), {}),
    "an empty column": (made("a,b,y", number, lambda _: "", label), {"missing": "mask"}),
    "no rows": ("a,b,y\n", {}),
    "nothing": ("", {}),
    "an inch": (made("a,b,y", lambda n: f'{n}"' if n % 5 else str(n), quoted, label), {}),
    "a quote that nothing closes": (made("a,b,y", number, name, label) + '"1,2,y\n', {}),
}


def found_in(path, options):
    """Returns all that there is to see of the records of a table, or its error."""
    try:
        columns = read_raw(path, Asked(**options))
    except DataError as error:
        return str(error)
    values = {
        feature: [np.asarray(value).tolist() for value in column]
        for feature, column in columns.block(np.arange(columns.num_records)).items()
    }
    owners = None if columns.owners is None else columns.owners.tolist()
    about = (columns.kind, columns.schema, columns.roles, list(columns.notes), columns.left_out)
    return about, values, owners


@pytest.mark.parametrize("case", CASES)
def test_what_is_found_is_the_same(tmp_path, as_large, case):
    text, options = CASES[case]
    path = tmp_path / "t.csv"
    path.write_text(text, newline="")
    held = found_in(path, options)
    as_large()
    assert found_in(path, options) == held


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252", "latin-1"])
def test_encodings(tmp_path, as_large, encoding):
    text = made("größe,y", lambda n: "é\x81"[: 1 + (encoding == "latin-1")] * (n % 9 + 1), label)
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(text.encode(encoding)))
    held = found_in(path, {})
    as_large()
    assert found_in(path, {}) == held


def test_many_columns(tmp_path, as_large):
    """They lie in one file: a process may open a thousand."""
    names = [f"c{number}" for number in range(1500)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join([",".join([*names, "y"])] + [",".join(["1"] * 1500 + ["a"])] * 20))
    as_large(20_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    try:
        assert read_raw(path).columns["features"].shape == (20, 1500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_bytes_that_are_no_text(tmp_path, as_large):
    path = tmp_path / "t.csv"
    as_large()
    path.write_bytes(made("a,y", number, label).encode() + b"\0")
    with pytest.raises(DataError, match="must be text, but found bytes of value 0"):
        read_raw(path)
    path.write_bytes(made("a,y", number, label).encode("utf-16")[:-1])
    with pytest.raises(DataError, match="must be text, but found bytes that are not utf-16"):
        read_raw(path)


def test_any_blocks_give_the_same(tmp_path, as_large):
    """A block ends within values, letters, quotes and line ends."""
    path = tmp_path / "t.csv"
    path.write_text(made("a,b,c,y", number, quoted, lambda n: "ü€😀"[: n % 4], label, rows=60))
    held = found_in(path, {})
    for size in random.Random(0).sample(range(8, 700), 30):
        as_large(size)
        assert found_in(path, {}) == held, size


def test_shards_are_the_same_bytes(tmp_path, as_large):
    path = tmp_path / "t.csv"
    path.write_text(made("a,b,c,d,e,y", number, word, quoted, gaps, rarely, label))
    # Rows of shards are in no order, and texts of nothing lie where others begin.
    options = {"missing": "mask", "num_shards": 3, "stratify": True, "text": "e"}
    records.write(path, tmp_path / "held", **options)
    as_large()
    assert isinstance(read_raw(path, Asked(missing="mask")).columns["features"], LargeArray)
    for workers in (1, 2):
        out = tmp_path / f"large{workers}"
        records.write(path, out, workers=workers, **options)
        names = sorted(file.name for file in out.iterdir())
        assert names == sorted(file.name for file in (tmp_path / "held").iterdir())
        for file in names:
            assert (out / file).read_bytes() == (tmp_path / "held" / file).read_bytes(), file


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("missing", [None, "mask"])
def test_a_table_to_predict_is_the_same_bytes(tmp_path, as_large, capsys, suffix, missing):
    rows = [
        {"a": row / 8, "c": word(row), "d": day(row), "f": name(row), "y": label(row)}
        for row in range(240)
    ]
    if missing is not None:  # Numbers and words that may be missing.
        rows = [{**row, "n": 2.5 if place % 2 else None} for place, row in enumerate(rows)]
        rows[9]["c"] = None
    csv.write_csv(pyarrow.Table.from_pylist(rows), tmp_path / "old.csv")
    options = {"missing": missing, "text": ["f"], "categories": ["c"], "label": "y"}
    schema = records.write(tmp_path / "old.csv", tmp_path / "data", **options).schema
    new = [{**row, "d": unclear_day(place)} for place, row in enumerate(rows[100:160])]
    new[7]["f"] = "NA"  # Which is text, or missing.
    if missing is not None:
        new = [{**row, "n": None} for row in new]
        new[30]["c"] = "null" if suffix == "csv" else None
    path = tmp_path / f"new.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in new))
    else:
        {"csv": csv.write_csv, "parquet": parquet.write_table}[suffix](
            pyarrow.Table.from_pylist(new, pyarrow.Table.from_pylist(rows).schema), path
        )
    found = []
    for kind in ("held", "large"):
        if kind == "large":
            as_large()
            assert read_table(path, in_file=True).store is not None
        keys = write_as_trained(path, schema, tmp_path / kind, lambda count: range(20, count))
        assert keys.values.tolist() == list(range(20, 60))
        files = {file.name: file.read_bytes() for file in sorted((tmp_path / kind).iterdir())}
        found.append((files, capsys.readouterr().err))
    assert found[0] == found[1]


def test_texts_beside_empty_ones(tmp_path):
    texts = [b"", b"ab", b"", b"", b"c" * 9, b""]
    edges = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    stored = Store().texts(lambda: [(np.frombuffer(b"".join(texts), np.uint8), edges)])
    for order in itertools.permutations(range(len(texts))):
        assert stored[np.array(order)].tolist() == [texts[row] for row in order]


def test_parquet(tmp_path, as_large):
    numbers = [None if n % 9 == 0 else n / 4 for n in range(100)]
    columns = {
        "a": numbers,
        "b": list(range(100)),
        "t": [None if n == 3 else f"text {n}" for n in range(100)],
        "c": [word(n) for n in range(100)],
        "big": pyarrow.array([name(n) for n in range(100)], pyarrow.large_string()),
        "kind": pyarrow.array([word(n) for n in range(100)]).dictionary_encode(),
        "none": pyarrow.array([None] * 100, pyarrow.string()),
        "when": pyarrow.array(range(100), pyarrow.timestamp("s")),
        "ok": [n % 2 == 0 for n in range(100)],
        "many": [[n, n + 1] for n in range(100)],
        "y": [label(n) for n in range(100)],
    }
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table(columns), path, row_group_size=30)
    for options in (
        {"missing": "mask"},
        {"missing": "drop"},
        {},
        {"missing": "mask", "text": "none,a,b,t"},
        {"missing": "mask", "client": "c"},
    ):
        held = found_in(path, options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(typed, "LARGE_BYTES", -1)
            assert found_in(path, options) == held
    as_large()
    assert isinstance(read_raw(path, Asked(missing="mask")).columns["features"], LargeArray)


JSON = {
    "numbers": {"a": lambda n: n * 0.37, "b": int, "c": lambda n: 10**20 + n, "d": lambda n: 1.0},
    "missing": {"a": lambda n: [None, n][n % 2], "b": lambda n: [float("nan"), n][n % 2]},
    "text": {
        "t": lambda n: f'a "text"\nof {n}' if n % 9 else None,
        "ü": lambda n: "é😀\u2028"[: n % 4],
        "c": word,
        "NA": lambda n: "NA",
    },
    "dates": {
        "d": lambda n: f"2024-01-{n % 28 + 1:02d}" if n % 9 else None,
        "e": lambda n: f"2024-01-{n % 28 + 1:02d}" if n != 77 else "soon",
        "f": day,
        "g": unclear_day,
    },
    "others": {
        "yes": lambda n: n % 3 == 0,
        "gaps": lambda n: [True, None, float("nan"), False][n % 4],
        "large": lambda n: 2**63 + n,
        "many": lambda n: [n] * (n % 3 + 1),
        "mixed": lambda n: str(n) if n % 2 else n,
        "none": lambda n: None,
        "of": lambda n: {"age": n, "name": name(n)},
    },
    "beside floats": {
        "a": lambda n: n if n % 3 else n + 0.5,
        "b": lambda n: n if n % 3 else float("nan"),
        "c": lambda n: [float("inf"), n, None, -0.0][n % 4],
        "d": lambda n: [1e22, 2**60 + n][n % 2],
    },
}


@pytest.mark.parametrize("case", JSON)
@pytest.mark.parametrize("missing", [None, "mask", "drop"])
@pytest.mark.parametrize("text", [False, True])
def test_json_lines(tmp_path, as_large, case, missing, text):
    lines = []
    for row in range(120):
        values = {key: value(row) for key, value in JSON[case].items()} | {
            "x": row,
            "y": label(row),
        }
        if row > 100:
            values["late"] = row * 0.5
        lines += [json.dumps(values, ensure_ascii=row % 2 == 0)] + [""] * (row % 50 == 49)
    path = tmp_path / "t.jsonl"
    for wrong in ([], ["[1]", '{"a": 1, "a": 2}', "{"]):
        path.write_text("\n".join([*lines, *wrong]), encoding="utf-8")
        options = {"missing": missing, "label": "y", "skip_bad": missing is not None}
        options |= {"text": [key for key in JSON[case] if key != "of"]} if text else {}
        held = found_in(path, options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(text_files, "LARGE_BYTES", -1)
            patch.setattr(text_files, "_BLOCK_BYTES", 700)
            patch.setattr(large_arrays, "_VALUES_AT_ONCE", 30)
            assert found_in(path, options) == held


def test_objects_whose_keys_are_ids(tmp_path, as_large, monkeypatch):
    monkeypatch.setattr(json_lines, "_MOST_NAMES", 100)
    monkeypatch.setattr(json_lines, "_MOST_CELLS", 10_000)
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({f"u{row}": 1, "y": 0}) + "\n" for row in range(250)))
    message = r"251 different ones in 250 objects, of which each has 2\. Write what differs"
    with pytest.raises(DataError, match=message):
        read_raw(path)
    as_large()
    with pytest.raises(DataError, match=r"different ones in .* objects, of which each has 2"):
        read_raw(path)


def test_a_full_disk_is_told(tmp_path, as_large, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "t.csv"
    path.write_text(made("a,y", number, label))
    as_large()
    monkeypatch.setattr(Store, "rows", fail)
    with pytest.raises(DataError, match=r"must have room .*No space left .*TMPDIR"):
        read_raw(path)
