"""The text of a file: packed or not, in whichever of the usual encodings."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import importlib.util
import zlib
from collections.abc import Iterator
from pathlib import Path

from tfdist.errors import DataError
from tfdist.records.wording import told_as

# By what a text begins with; the first of UTF-32 begins as one of UTF-16 does.
_ENCODINGS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Those that do not announce themselves, in the order in which they are tried; the last one is
# any bytes.
_UNMARKED = {
    "utf-8": None,
    "cp1252": "Western European Windows text (cp1252)",
    "latin-1": "Latin-1",
}
# Written once more by programs that take it for text.
_MARK = "\ufeff"
_BLOCK_BYTES = 16 << 20
#: A table of more than this is read a block at a time, and never held as a whole.
LARGE_BYTES = 256 << 20
# Tables are packed to a twentieth; a bomb to a thousandth, the most that gzip can.
_USUAL_RATIO, _LARGEST_RATIO = 20, 200
_NEVER_TOO_LARGE_BYTES = 1 << 30


def read_text(path: Path) -> tuple[str, tuple[str, ...]]:
    """Returns the text of a file, and notes of how it was read.

    The bytes are UTF-8 (with or without a mark), UTF-16 or UTF-32 with its mark, or else those of
    Western European Windows (cp1252), or of Latin-1 where not even that holds, which a note says.

    Raises:
        DataError: it cannot be read or unpacked, or is no text.
    """
    text, encoding = decoded(read_bytes(path), path)
    return text, _notes(path, encoding)


def _notes(path: Path, encoding: str | None) -> tuple[str, ...]:
    return () if encoding is None else (f"{path} is not UTF-8: it was read as {encoding}",)


def is_large(path: Path) -> bool:
    """Whether a table should be read in blocks, for which pyarrow is needed. Raises DataError."""
    if importlib.util.find_spec("pyarrow") is None:
        return False
    with _readable(path):
        return path.stat().st_size * (_USUAL_RATIO if _is_packed(path) else 1) > LARGE_BYTES


def read_rows(path: Path, *, has_quotes: bool) -> tuple[Iterator[str], tuple[str, ...]]:
    """Returns what ``read_text`` does, a block at a time: each ends where a line does.

    Args:
        has_quotes: whether a line may not end within quotes.
    """
    encoding = _encoding_of(path)
    return _rows_of(path, encoding, has_quotes), _notes(path, _UNMARKED.get(encoding))


def _encoding_of(path: Path) -> str:
    """Returns that of a file, which is read once for it. Raises as ``read_text`` does."""
    start = next(_pieces(path), b"")
    marked = next((name for mark, name in _ENCODINGS.items() if start.startswith(mark)), None)
    for encoding in _UNMARKED if marked is None else [marked]:
        with contextlib.suppress(UnicodeDecodeError):
            for text in _texts(path, encoding):
                if marked is None and "\0" in text:
                    raise _no_text(path, "bytes of value 0")
            break
    else:
        raise _no_text(path, f"bytes that are not {marked}")
    return encoding


def _texts(path: Path, encoding: str) -> Iterator[str]:
    """Yields the text of a file, a block at a time. Raises UnicodeDecodeError, too."""
    decoder = codecs.getincrementaldecoder(encoding)()
    for number, piece in enumerate(_pieces(path)):
        text = decoder.decode(piece)
        yield text if number else text.lstrip(_MARK)
    yield decoder.decode(b"", final=True)


def _rows_of(path: Path, encoding: str, has_quotes: bool) -> Iterator[str]:
    """Yields the text of a file, a block at a time, each of which ends with a row."""
    left: list[str] = []  # Of a row whose end has not been found.
    quotes = 0
    for text in _texts(path, encoding):
        end = _end_of_rows(text, quotes) if has_quotes else text.rfind("\n") + 1
        if end:
            yield "".join([*left, text[:end]])
            left, quotes = [], 0
        left.append(text[end:])
        quotes += text.count('"', end)
    if last := "".join(left):
        yield last


def _end_of_rows(text: str, quotes: int) -> int:
    """Returns where the last row ends that ends in a text; 0 for none.

    Args:
        quotes: how many the row has had before the text.
    """
    is_within = (quotes + text.count('"')) % 2 == 1
    end = len(text)
    while (found := text.rfind("\n", 0, end)) >= 0:
        is_within ^= text.count('"', found, end) % 2 == 1
        if not is_within:
            return found + 1
        end = found
    return 0


def read_bytes(path: Path) -> bytes:
    """Returns the bytes of a file, unpacked where it is called .gz.

    Raises:
        DataError: it cannot be read or unpacked, or was made to fill the memory.
    """
    if _is_packed(path):
        return b"".join(_pieces(path))
    with _readable(path):
        return path.read_bytes()


def _pieces(path: Path) -> Iterator[bytes]:
    """Yields the bytes that ``read_bytes`` returns, a block at a time."""
    num_bytes = 0
    with _readable(path), gzip.open(path) if _is_packed(path) else path.open("rb") as file:
        packed = path.stat().st_size
        while piece := file.read(_BLOCK_BYTES):
            num_bytes += len(piece)
            if num_bytes > max(_NEVER_TOO_LARGE_BYTES, _LARGEST_RATIO * packed):
                raise DataError(
                    f"{path} must unpack to at most {_LARGEST_RATIO} times its size, or to 1 GiB",
                    received=f"more than {num_bytes:,} bytes in {packed:,}",
                    mend="Unpack it with gunzip if it is one that you trust",
                )
            yield piece


def _is_packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _readable(path: Path) -> contextlib.AbstractContextManager[None]:
    mend = "Check that you may read it, or get it again if it was cut"
    return told_as(f"{path} must be readable", mend, OSError, EOFError, zlib.error)


def decoded(data: bytes, path: Path) -> tuple[str, str | None]:
    """Returns the text, and its encoding where that is none that announces itself."""
    marked = next((name for mark, name in _ENCODINGS.items() if data.startswith(mark)), None)
    if marked is None and b"\0" in data:
        raise _no_text(path, "bytes of value 0")
    for encoding in _UNMARKED if marked is None else [marked]:
        with contextlib.suppress(UnicodeDecodeError):
            return data.decode(encoding).lstrip(_MARK), _UNMARKED.get(encoding)
    raise _no_text(path, f"bytes that are not {marked}")


def _no_text(path: Path, received: str) -> DataError:
    return DataError(f"{path} must be text", received=received, mend="Save it as UTF-8")
