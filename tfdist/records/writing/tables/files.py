"""Files that are tables, by their names."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tfdist.errors import DataError
from tfdist.records.wording import NO_RECORD
from tfdist.records.writing.tables.table import Table

_KINDS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "feather",
}
_PACKED = ("csv", "tsv", "jsonl")
#: What is read, for messages.
NAMES = "a table (.csv, .tsv or .jsonl, also with .gz, .parquet, .arrow or .feather)"
#: What is no table that is read.
SPREADSHEETS = (".xlsx", ".xls", ".ods")


def kind_of_file(path: Path) -> str | None:
    """Returns what kind of table a file is called; None for any other file."""
    name = path.name.lower()
    kind = _KINDS.get(Path(name.removesuffix(".gz")).suffix)
    return None if name.endswith(".gz") and kind not in _PACKED else kind


def read_table(path: Path, kind: str | None = None, *, in_file: bool = False) -> Table:
    """Returns the rows of a file. Raises DataError.

    Args:
        kind: what it is, where ``kind_of_file`` does not know it.
        in_file: whether the values of a large one may stay in files, see ``Table.store``.
    """
    kind = kind_of_file(path) or kind
    assert kind is not None, path
    if kind in ("csv", "tsv"):
        from tfdist.records.writing.tables.delimited import read_delimited

        return read_delimited(path, kind, in_file=in_file)
    if kind == "jsonl":
        from tfdist.records.writing.tables.json_lines import read_json_lines

        return read_json_lines(path, in_file=in_file)
    from tfdist.records.writing.tables.typed import read_arrow

    table = read_arrow(path, kind, in_file=in_file)
    if not len(table.lines):
        raise DataError(f"{path} must have rows", received="none", mend=NO_RECORD)
    return table


@contextlib.contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Encloses what may write temporary files of a table. Raises DataError where they are full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DataError(
            f"the folder of temporary files must have room for several times the bytes of {path}",
            received=f"an error in {tempfile.gettempdir()}: {error}",
            mend="Name one on a larger disk in the variable TMPDIR",
        ) from None
