"""Files of text, packed or not."""

from __future__ import annotations

import gzip

import pytest

from tfdist.errors import DataError
from tfdist.records.writing import text_files


def test_what_was_packed_to_fill_the_memory_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(text_files, "_NEVER_TOO_LARGE_BYTES", 4 << 20)
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"0" * (4 << 20)))
    assert len(text_files.read_bytes(path)) == 4 << 20
    path.write_bytes(gzip.compress(b"0" * (5 << 20)))
    with pytest.raises(DataError, match=r"200 times its size.*more than 5,242,880 bytes in \d"):
        text_files.read_bytes(path)


def test_a_large_table_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(text_files, "_NEVER_TOO_LARGE_BYTES", 1000)
    rows = b"".join(b"%d,%d\n" % (n, n * n) for n in range(100_000))
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(rows))
    assert text_files.read_bytes(tmp_path / "t.csv.gz") == rows
