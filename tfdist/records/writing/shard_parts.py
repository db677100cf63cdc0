"""Shards that several jobs write, a part each: what says that a part is there, and all as one.

Each part lies in a folder of its own beside the one that all of them become, so that no two jobs
write into one folder. It has a note in the place of a manifest: nothing reads it as a data set.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, OptionError, spelt
from tfdist.records.format.columns import Columns
from tfdist.records.format.files import sums
from tfdist.records.format.manifest import Manifest
from tfdist.records.format.offsets import write_offsets
from tfdist.records.parts import Part
from tfdist.records.wording import listed
from tfdist.records.writing.journal import Journal
from tfdist.records.writing.options import cores
from tfdist.records.writing.places import check_free
from tfdist.records.writing.shard_files import said_of, staging_folder, stop_on_sigterm
from tfdist.records.writing.unfinished import LOOKED_AT

_NOTE = "part.jsonl"
_SHOWN = 20
# What all parts must have alike, in words.
_ALIKE = {
    "written_by": "version of tfdist",
    "options": "options",
    "files": "source",
    "listing": "files of the source, with their sizes and times",
    "plan": "records",
}


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a part is.

    Attributes:
        part, parts: the number of the part, and of all.
        run: what decided what was written, see ``Unfinished.now``: alike in all parts.
        files: of each split the shards of all parts, in their order.
        manifest: that of all parts, with the shards of this one alone, as JSON.
    """

    part: int
    parts: int
    run: Mapping[str, Any]
    files: Mapping[str, Sequence[str]]
    manifest: Mapping[str, Any]

    @property
    def shards(self) -> dict[str, Mapping[str, Any]]:
        """Those of this part, by file."""
        splits = self.manifest["splits"].values()
        return {shard["file"]: shard for split in splits for shard in split["shards"]}

    def is_in(self, folder: Path) -> bool:
        """Whether all shards are there, in their size."""
        with contextlib.suppress(OSError):
            shards = self.shards.items()
            return all((folder / name).stat().st_size == shard["bytes"] for name, shard in shards)
        return False

    def manifest_of(self, shards: Mapping[str, Mapping[str, Any]] | None = None) -> Manifest:
        """Returns that of some shards, by file; None: of those of this part."""
        shards = self.shards if shards is None else shards
        value = {key: item for key, item in self.manifest.items() if key != "checksum"}
        value["splits"] = {
            name: {
                **value["splits"][name],
                "records": sum(shards[file]["records"] for file in files if file in shards),
                "shards": [shards[file] for file in files if file in shards],
            }
            for name, files in self.files.items()
            if not shards.keys().isdisjoint(files)
        }
        return Manifest.from_json(value)

    def columns(self, folder: Path) -> Columns:
        """Returns what there is to say of a part that is not written again."""
        manifest = self.manifest_of()
        note = f"{folder} is there whole: nothing was written"
        return Columns(manifest.source, manifest.schema, {}, notes=(note,))


def write_note(folder: Path, note: Note) -> None:
    """Writes into the folder of a part what it is. Raises OSError."""
    Journal(folder / _NOTE).add(vars(note))


def read_note(folder: Path) -> Note | None:
    """Returns what a part is; None where there is none, or a damaged one. Raises OSError."""
    entries = Journal(folder / _NOTE).entries
    return Note(**entries[0]) if entries else None


def check_own(folder: Path, note: Note) -> None:
    """Raises DataError: others have put something into the folder of a part."""
    foreign = sorted({path.name for path in folder.iterdir()} - {_NOTE, *note.shards, *LOOKED_AT})
    if foreign:
        raise DataError(
            f"{folder} must hold nothing but its part to be written again",
            received=listed(foreign, _SHOWN),
            mend="Move that elsewhere",
        )


def remove(folder: Path, note: Note) -> None:
    """Removes a part, but not what others have put there."""
    with contextlib.suppress(OSError):
        # The note first: a part without all of its shards is not taken for a whole one.
        for name in (_NOTE, *note.shards, *LOOKED_AT):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def folders_of(out: Path) -> list[Path]:
    """Returns the folders of the parts of OUT that are there, and of those that are not whole."""
    pattern = glob.escape(out.stem) + ".part-*-of-*" + glob.escape(out.suffix)
    return sorted(path for path in out.parent.glob(pattern) if path.is_dir())


def merge(out: Path) -> tuple[Manifest, int]:
    """Makes of all parts the folder that one run would have written, byte for byte.

    Shards get a second name there, or are copied where the file system has none; the parts are
    removed when the folder is whole.

    Returns:
        The manifest, and how many parts there were.

    Raises:
        OptionError: there is no part.
        DataError: the folder is there, too, or a part is missing, damaged, or of another run.
    """
    out = out.resolve()
    if out.is_dir() and any(out.iterdir()) and not folders_of(out):  # Merged already, maybe.
        raise OptionError(
            "parts must be there to be merged",
            received=f"{out}, which is there, and no part beside it",
            mend=f"See that nothing is lacking: tfdist inspect {out} --check",
        )
    check_free(out, None, overwrite=False)
    with said_of(out):
        folders, notes = _whole_parts(out)
    shards = {file: shard for note in notes for file, shard in note.shards.items()}
    each = {file for files in notes[0].files.values() for file in files}
    assert len(shards) == sum(len(note.shards) for note in notes)
    assert shards.keys() == each
    manifest = notes[0].manifest_of(shards)
    with said_of(out), stop_on_sigterm(), staging_folder(out) as staging:
        for folder, note in zip(folders, notes, strict=True):
            for file in note.shards:
                _put(folder / file, staging / file)
        write_offsets(staging, manifest)
        manifest.save(staging)
    for folder, note in zip(folders, notes, strict=True):
        remove(folder, note)
    return manifest, len(notes)


def _put(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # Of some file systems of clusters, a file has one name alone.
        shutil.copyfile(file, to)


def _whole_parts(out: Path) -> tuple[list[Path], list[Note]]:
    """Returns the folders and notes of all parts, in their order. Raises as ``merge``."""
    found = [note for folder in folders_of(out) if (note := read_note(folder))]
    if not found:
        raise OptionError(
            "parts must be there to be merged",
            received=f"none of {out} that is whole",
            mend=f"Make them: `tfdist shard SOURCE {out} --part 1/8`, to 8/8",
        )
    if len({note.parts for note in found}) > 1:
        counts = sorted({note.parts for note in found})
        raise DataError(
            f"all parts of {out} must be of one number of parts",
            received=" and ".join(f"parts of {count}" for count in counts),
            mend="Remove the folders of those that are not meant",
        )
    by_number, parts = {note.part: note for note in found}, Part(1, found[0].parts).others
    missing = [part.number for part in parts if part.number not in by_number]
    if missing:
        raise DataError(
            f"every part of {out} must be there",
            received=f"{len(missing):,} of {len(parts):,} missing or not whole yet: "
            f"{listed(map(str, missing), _SHOWN)}",
            mend="Make each as the others were made, with "
            f"{spelt('part', str(parts[missing[0] - 1]))} {spelt('resume', True)}",
        )
    folders = [part.path_of(out) for part in parts]
    notes = [by_number[part.number] for part in parts]
    _check_alike(out, notes)
    _check_undamaged(folders, notes)
    return folders, notes


def _check_alike(out: Path, notes: Sequence[Note]) -> None:
    first = notes[0]
    for note in notes:
        others = [word for name, word in _ALIKE.items() if note.run[name] != first.run[name]]
        if others:
            raise DataError(
                f"all parts of {out} must be of the same {', '.join(others)}",
                received=f"others in part {note.part} than in part {first.part}",
                mend=f"Make one of them again, with {spelt('overwrite', True)}",
            )


def _check_undamaged(folders: Sequence[Path], notes: Sequence[Note]) -> None:
    """Raises DataError unless all shards are as they were written: each is read and summed."""

    def is_damaged(of: tuple[Path, Note, Mapping[str, Any]]) -> bool:
        folder, _, shard = of
        try:
            return sums.of(folder / shard["file"]) != shard["checksum"]
        except OSError:
            return True

    pairs = zip(folders, notes, strict=True)
    each = [(folder, note, shard) for folder, note in pairs for shard in note.shards.values()]
    with ThreadPoolExecutor(cores(), thread_name_prefix="tfdist-sums") as pool:
        damaged = [of for of, bad in zip(each, pool.map(is_damaged, each), strict=True) if bad]
    if damaged:
        numbers = dict.fromkeys(str(note.part) for _, note, _ in damaged)
        folder, note, shard = damaged[0]
        raise DataError(
            "all shards of a part must be there as they were written",
            received=f"others in part {listed(numbers, _SHOWN)}, as {folder / shard['file']}",
            mend=f"Make each again, with {spelt('part', f'{note.part}/{note.parts}')} "
            f"{spelt('overwrite', True)}",
        )
