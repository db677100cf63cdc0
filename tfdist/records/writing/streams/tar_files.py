"""A .tar file of records as webdataset writes them: files of one stem are the parts of a record."""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError, in_one_line, read_json, spelt
from tfdist.records.wording import left_out, told_as
from tfdist.records.writing.roles import Asked
from tfdist.records.writing.streams.stream import ImageFile, Stream, Structure

SUFFIXES = (".tar", ".tar.gz", ".tgz")
_GZIP = b"\x1f\x8b"
_PIECE_BYTES = 1 << 20
_BAD_SHOWN = 5
_UNREADABLE = (tarfile.TarError, EOFError, OSError, zlib.error)
_IMAGES = ("jpg", "jpeg", "png")
# What the parts are called where their files have nothing but an extension.
_NAMES = {"jpg": "image", "jpeg": "image", "png": "image", "cls": "label", "txt": "text"}


def is_tar(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


class _Record(dict):
    """The parts of a record by name, and what their files are called."""

    place: str


class _BadFileError(Exception):
    """A file that is not what its extension says, and why."""


def from_tar(path: Path, asked: Asked, *, decode: bool = True) -> Stream:
    """Returns the records of an archive, which is read once, from its beginning to its end.

    "dog.jpg", "dog.cls" and "dog.json" make one record: an image "image", whose bytes are kept, a
    label "label", and each value of the JSON object by its key. "dog.left.png" is an image "left".
    Text in .txt is "text", arrays in .npy are called as their extension.

    Args:
        decode: whether images are decoded where bad records are left out.

    Raises:
        DataError: no archive, or records that do not have the same parts.
    """
    skipped: Counter[str] = Counter()
    notes: list[str] = []
    bad = _Bad(path, asked, decode)
    records = bad.without(_records(path, skipped, notes))
    first = next(records, None)
    if first is None and bad.left_out:
        raise DataError(
            f"{path} must hold a record that can be read",
            received=", ".join(bad.notes()),
            mend="Repair them, or get the archive again",
        )
    if first is None:
        raise DataError(
            f"{path} must hold files of images, text, numbers or arrays, as webdataset writes them",
            received="none",
            mend="Put such files in it, as 0001.jpg and 0001.cls for one record",
        )
    structure = Structure.of(first, asked, path.name)

    def every() -> Iterator[Mapping[str, Any]]:
        yield first
        yield from records
        if skipped:
            kinds = [f"{count:,} {kind}" for kind, count in skipped.most_common()]
            notes.append(left_out(skipped.total(), "file", "as of kinds that are not read", kinds))
        notes.extend(bad.notes())

    return structure.stream("tar", [(None, every())], notes=notes, left_out=bad.left_out)


class _Bad:
    """The records that cannot be read, where they are to be left out.

    Attributes:
        left_out: how many there were so far, by reason.
    """

    def __init__(self, path: Path, asked: Asked, is_decoded: bool):
        self.left_out: dict[str, int] = {}
        self._path, self._asked, self._is_decoded = path, asked, is_decoded
        self._labels: tuple[str, ...] | None = None
        self._records = 0
        self._first: list[str] = []

    def without(self, records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the good ones. Raises DataError for a bad one that is not to be left out."""
        for record in records:
            self._records += 1
            wrong = self._wrong(record)
            if wrong is None:
                yield record
                continue
            why, said = wrong
            self.left_out[why] = self.left_out.get(why, 0) + 1
            if len(self._first) < _BAD_SHOWN:
                self._first.append(said)

    def notes(self) -> Iterator[str]:
        if count := sum(self.left_out.values()):
            more = f" and {count - len(self._first):,} more" * (count > len(self._first))
            said = ", ".join(self._first) + more
            yield left_out(count, "record", "as bad", [said], of=self._records)

    def _wrong(self, record: dict[str, Any]) -> tuple[str, str] | None:
        for value in record.values():
            if isinstance(value, _BadFileError):
                member, kind, reason = value.args
                if not self._asked.skip_bad:
                    raise DataError(
                        f"every .{kind} file of {self._path} must be valid",
                        received=f"{member}: {reason}",
                        mend=f"Repair it, or leave its record out with {spelt('skip_bad', True)}",
                    )
                return f"unreadable .{kind} file", f"{member}: {reason}"
        return self._wrong_image(record) if self._asked.skip_bad else None

    def _wrong_image(self, record: dict[str, Any]) -> tuple[str, str] | None:
        images = {name: value for name, value in record.items() if isinstance(value, ImageFile)}
        if not images:
            return None
        from tfdist.records.writing.streams.images import fault

        if self._labels is None:
            self._labels = Structure.of(record, self._asked, self._path.name).labels
        for name, value in images.items():
            role = "label" if name in self._labels else "input"
            if reason := fault(value, role, is_decoded=self._is_decoded):
                return "unreadable image", f"{value.member}: {reason}"
        return None


class _Member(tarfile.TarInfo):
    """A file of an archive. A damaged header is an error: tarfile takes it for the end."""

    @classmethod
    def frombuf(cls, *header: Any) -> tarfile.TarInfo:
        try:
            return super().frombuf(*header)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:
            raise tarfile.ReadError(str(error)) from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    """Opens an archive as a stream. Of gzip, tarfile itself reads one part and no checksum."""
    with path.open("rb") as file:
        is_gzip = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        data, mode = (gzip.GzipFile(fileobj=file), "r|") if is_gzip else (file, "r|*")
        with data, tarfile.open(fileobj=data, mode=mode, tarinfo=_Member) as archive:
            yield archive


def _check_end(path: Path, archive: tarfile.TarFile, notes: list[str]) -> None:
    """Raises ReadError for an archive that goes on behind its end; notes one that has none."""
    rest = archive.fileobj
    if rest.tell() == archive.offset:
        notes.append(f"{path} lacks the mark that ends an archive: it may have been cut")
    while piece := rest.read(_PIECE_BYTES):
        if piece.count(0) < len(piece):
            raise tarfile.ReadError("more behind its end, as cat makes it of archives, not tar -A")


def _records(path: Path, skipped: Counter[str], notes: list[str]) -> Iterator[dict[str, Any]]:
    stem, record = None, _Record()
    mend = "Get it again, or write it anew"
    told = told_as(f"{path} must be a whole .tar archive", mend, *_UNREADABLE)
    with told, _opened(path) as archive:
        for member in archive:
            folder, _, file = member.name.rpartition("/")
            name, dot, kind = file.partition(".")
            if name and dot and (member.islnk() or member.issym()):
                skipped[f".{kind.lower()} (a link)"] += 1
            if not member.isfile() or not name:
                continue
            if not dot:
                skipped["without an extension"] += 1
                continue
            if (folder, name) != stem and record:
                yield record
                record = _Record()
            stem = (folder, name)
            record.place = f"{'/'.join(filter(None, stem))}.* of {path}"
            data = archive.extractfile(member).read()
            parts = _parts(kind.lower(), data, member.name)
            if parts is None:
                skipped[f".{kind.lower()}"] += 1
                continue
            for part in parts:
                if part in record:
                    raise DataError(
                        f"each part of a record of {path} must come once",
                        received=f"'{part}' twice, again in {member.name}",
                        mend="Rename one: files of a record have one name up to its first dot",
                    )
            record.update(parts)
        _check_end(path, archive, notes)
    if record:
        yield record


def _parts(kind: str, data: bytes, member: str) -> dict[str, Any] | None:
    """Returns the values of one file by name; None of a kind that is not read."""
    prefix, _, kind = kind.rpartition(".")
    name = prefix or _NAMES.get(kind, kind)
    read: dict[str, Callable[[bytes], Any]] = {
        **dict.fromkeys(_IMAGES, ImageFile),
        "cls": lambda text: int(text.decode("utf-8-sig")),
        "txt": lambda text: text.decode("utf-8-sig"),
        "json": lambda text: read_json(text.decode("utf-8-sig"), keys_once=True),
        "npy": lambda array: np.lib.format.read_array(io.BytesIO(array), allow_pickle=False),
    }
    if kind not in read:
        return None
    try:
        value = read[kind](data)
    except Exception as error:  # The head of a broken array may lead to anything.
        return {name: _BadFileError(member, kind, in_one_line(error))}
    if kind in _IMAGES:
        value.member = member
    return value if isinstance(value, dict) else {name: value}
