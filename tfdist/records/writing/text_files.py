"""The text of a file: packed or not, in whichever of the usual encodings."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path

from tfdist.errors import DataError

# By what a text begins with; the first of UTF-32 begins as one of UTF-16 does.
_ENCODINGS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Written once more by programs that take it for text.
_MARK = "\ufeff"
_CHUNK_BYTES = 1 << 20
# Tables are packed to a twentieth; a bomb to a thousandth, the most that gzip can.
_LARGEST_RATIO = 200
_NEVER_TOO_LARGE_BYTES = 1 << 30


def read_text(path: Path) -> tuple[str, tuple[str, ...]]:
    """Returns the text of a file, and notes of how it was read.

    The bytes are UTF-8 (with or without a mark), UTF-16 or UTF-32 with its mark, or else those of
    Western European Windows (cp1252), or of Latin-1 where not even that holds, which a note says.

    Raises:
        DataError: it cannot be read or unpacked, or is no text.
    """
    text, encoding = decoded(read_bytes(path), path)
    if encoding is None:
        return text, ()
    return text, (f"{path} is not UTF-8: it was read as {encoding}",)


def read_bytes(path: Path) -> bytes:
    """Returns the bytes of a file, unpacked where it is called .gz.

    Raises:
        DataError: it cannot be read or unpacked, or was made to fill the memory.
    """
    try:
        return _unpacked(path) if path.suffix.lower() == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} must be readable",
            received=f"an error: {error}",
            mend="Check that you may read it, or get it again if it was cut",
        ) from None


def _unpacked(path: Path) -> bytes:
    packed = path.stat().st_size
    chunks: list[bytes] = []
    num_bytes = 0
    with gzip.open(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > max(_NEVER_TOO_LARGE_BYTES, _LARGEST_RATIO * packed):
                raise DataError(
                    f"{path} must unpack to at most {_LARGEST_RATIO} times its size, or to 1 GiB",
                    received=f"more than {num_bytes:,} bytes in {packed:,}",
                    mend="Unpack it with gunzip if it is one that you trust",
                )
    return b"".join(chunks)


def decoded(data: bytes, path: Path) -> tuple[str, str | None]:
    """Returns the text, and its encoding where that is none that announces itself."""
    marked = next((name for mark, name in _ENCODINGS.items() if data.startswith(mark)), None)
    try:
        if marked is not None:
            return data.decode(marked).lstrip(_MARK), None
        if b"\0" in data:
            raise DataError(
                f"{path} must be text", received="bytes of value 0", mend="Save it as UTF-8"
            )
        return data.decode("utf-8").lstrip(_MARK), None
    except UnicodeDecodeError as error:
        if marked is not None:
            raise DataError(
                f"{path} must be text", received=f"an error: {error}", mend="Save it as UTF-8"
            ) from None
    try:
        return data.decode("cp1252"), "Western European Windows text (cp1252)"
    except UnicodeDecodeError:
        return data.decode("latin-1"), "Latin-1"
