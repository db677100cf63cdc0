"""Predictions in parts: what is in a part, what says that it is there whole, and all as one."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, OptionError, read_json
from tfdist.records.parts import Part
from tfdist.records.replacing import replacing
from tfdist.records.wording import listed
from tfdist.runs.files import write_json
from tfdist.runs.merged_files import join, rows_of
from tfdist.training.engine import model_path

_SHOWN = 20
# What all parts must have alike, in words.
_ALIKE = {
    "model": "weights",
    "function": "function of the model",
    "data": "records",
    "trained_on": "shards of the training",
    "pad_to": "padding",
    "of": "number of records",
    "global_batch_size": "global batch size",
}


class Share:
    """The records of a part: whole batches of the run that it is a part of.

    A record meets the same others in its batch as in one run, so that its numbers are the same to
    the last bit.

    Attributes:
        part: None is all of them.
        start, stop, of: its records and the number of all, once that is known.
    """

    def __init__(self, part: Part | None, global_batch_size: int):
        self.part, self.global_batch_size = part, global_batch_size
        self.start = self.stop = self.of = 0

    def among(self, records: int) -> range:
        """Returns which of so many records are those of the part.

        Raises:
            OptionError: there are fewer batches than parts.
        """
        part, size = self.part or Part(1, 1), self.global_batch_size
        batches = -(-records // size)
        if part.parts > batches:
            raise OptionError(
                "--part must divide records into at most as many parts as they have batches",
                received=f"{part} of {records:,} records, in {batches:,} batches of {size}",
                mend=f"Use {batches} parts at most, or a smaller --global-batch-size for all",
            )
        first, last = part.range_of(batches)
        self.start, self.stop, self.of = first * size, min(last * size, records), records
        return range(self.start, self.stop)


@dataclass(frozen=True, kw_only=True)
class Note:
    """What stands beside the file of a part, once that is whole.

    Attributes:
        part, parts: the number of the part, and of all.
        start, stop, of: its records, and the number of all.
        model, function, data, trained_on: see ``digests_of``.
        pad_to: what the training padded records to.
        outputs: name -> [shape, type].
        command: that made it, without the part.
        sha256: of the file.
    """

    part: int
    parts: int
    start: int
    stop: int
    of: int
    model: str
    function: str
    data: str
    trained_on: str
    pad_to: Any = None  # Which earlier versions did not heed.
    global_batch_size: int
    outputs: Mapping[str, Sequence[Any]]
    command: Sequence[str]
    sha256: str

    def is_of(self, file: Path) -> bool:
        """Whether ``file`` is there as it was written."""
        return file.is_file() and digest_of_file(file) == self.sha256


def write_note(
    file: Path,
    share: Share,
    outputs: Mapping[str, Sequence[Any]],
    digests: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> None:
    """Writes beside the file of a part, which is there whole, what it is.

    Args:
        digests: as ``digests_of`` returns them, and ``pad_to``.
        asked: the options that make it, by name; None: not given; a list: each of it.
    """
    rows = share.stop - share.start
    assert share.part is not None
    assert all(shape[0] == rows for shape, _ in outputs.values()), (outputs, rows)
    every = {name: value if isinstance(value, list) else [value] for name, value in asked.items()}
    said = [
        [f"--{n}", str(one)] for n, values in every.items() for one in values if one is not None
    ]
    note = Note(
        part=share.part.number,
        parts=share.part.parts,
        start=share.start,
        stop=share.stop,
        of=share.of,
        **digests,
        global_batch_size=share.global_batch_size,
        outputs=outputs,
        command=["tfdist", "predict", *itertools.chain(*said)],
        sha256=digest_of_file(file),
    )
    write_json(_note_of(file), asdict(note))


def _note_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


def whole_part(file: Path, digests: Mapping[str, Any], global_batch_size: int) -> Note | None:
    """Returns the note of a part that need not be made again; None where there is no whole one.

    Raises:
        OptionError: it is there, and of other weights, records or batches.
    """
    note = _read(_note_of(file))
    if note is None or not note.is_of(file):
        return None
    asked = {**digests, "global_batch_size": global_batch_size}
    others = [_ALIKE[name] for name, value in asked.items() if getattr(note, name) != value]
    if others:
        raise OptionError(
            "--resume must go on with the same prediction",
            received=f"{file} of another {' and '.join(others)}",
            mend="Give what it was begun with, another --output, or --overwrite without --resume",
        )
    return note


def digests_of(model: str, weights: Path, data: str, training: str | None) -> dict[str, str]:
    """Returns what tells a prediction from others: digests of all that its numbers come from.

    Args:
        model: as ``tfdist.predict`` takes it; of a module it is the name alone.
        training: the shards that tell how photos and tables are read; None: none.

    Raises:
        DataError: there is no such data.
    """
    place, called = model_path.parts(model)
    program = digest_of_file(Path(place)) if Path(place).is_file() else place
    return {
        "model": digest_of_file(weights),
        "function": f"{called} {program}",
        "data": digest_of_data(data),
        "trained_on": "" if training is None else _digest_of_schema(training),
    }


def _digest_of_schema(training: str) -> str:
    from tfdist.records.format.manifest import load_manifest

    text = json.dumps(load_manifest(training).schema.to_json(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """Returns what tells the content of a file from others."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_data(data: str) -> str:
    """Returns what tells records from others: nothing but names and sizes of photos in folders.

    Raises:
        DataError: there is no such data.
    """
    from tfdist.records.format.manifest import find_split
    from tfdist.records.writing.as_trained import find_raw
    from tfdist.records.writing.images.search import all_images

    raw, digest = find_raw(data), hashlib.sha256()
    if raw is None:
        _, split, manifest = find_split(Path(data))
        digest.update(f"{split}\0{manifest.to_text()}".encode())
    elif raw.is_file():
        return digest_of_file(raw)
    else:
        for image in all_images(raw):
            size = image.path.stat().st_size if image.path.exists() else None
            digest.update(os.fsencode(image.path.relative_to(raw)) + f"\0{size}\0".encode())
    return digest.hexdigest()


def _read(path: Path) -> Note | None:
    """Returns a note; None where there is none. Raises DataError where it is something else."""
    try:
        value = read_json(path.read_text(encoding="utf-8"))
        note = Note(**value)
        numbers = (note.part, note.parts, note.start, note.stop, note.of)
        are_numbers = all(type(number) is int for number in numbers)
        are_words = all(isinstance(word, str) for word in note.command)
        if not are_numbers or not are_words or not 1 <= note.part <= note.parts:
            raise ValueError("other values")
        return note
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        raise DataError(
            f"{path} must be as `tfdist predict --part` wrote it",
            mend="Remove it, and make the part again",
        ) from None


def merge(output: Path, *, overwrite: bool = False) -> tuple[int, int]:
    """Joins the parts of ``output`` to the file that one run would have written.

    Never more than some megabytes of them are in memory. The parts are removed when it is whole.

    Returns:
        How many parts there were, and records, each once.

    Raises:
        OptionError: the file is there, or no part of it.
        DataError: a part is missing, or of another model, of other records or other parts.
    """
    if output.is_dir() or (output.exists() and not overwrite):
        raise OptionError(
            "the merged file must be a new one",
            received=f"{output}, which is there already",
            mend="Name the file of the predictions: shards are there, with no part left to join"
            if output.is_dir()
            else "Move it away, or --overwrite",
        )
    notes = _notes(output)
    files = [Part(note.part, note.parts).path_of(output) for note in notes]
    for file, note in zip(files, notes, strict=True):
        rows = rows_of(file)
        if rows not in (None, note.stop - note.start):
            raise DataError(
                f"{file} must have the records of its note",
                received=f"{rows:,} rows for {note.stop - note.start:,} records",
                mend=f"Make it again: {_command(note, note.part, '--overwrite')}",
            )
    with replacing(output) as temporary:
        join(files, temporary)
    for file in files:
        _note_of(file).unlink()
        file.unlink()
    return len(files), notes[-1].stop


def _notes(output: Path) -> list[Note]:
    """Returns the notes of all parts, in their order. Raises as ``merge``."""
    pattern = glob.escape(output.stem) + ".part-*-of-*" + glob.escape(output.suffix) + ".json"
    found = [note for path in sorted(output.parent.glob(pattern)) if (note := _read(path))]
    if not found:
        raise OptionError(
            "parts must be there to be merged",
            received=f"none of {output}",
            mend="Make them: `tfdist predict ... --part 1/8`, to 8/8, with the same --output",
        )
    if len({note.parts for note in found}) > 1:
        counts = sorted({note.parts for note in found})
        raise DataError(
            f"all parts of {output} must be of one number of parts",
            received=" and ".join(f"parts of {count}" for count in counts),
            mend="Remove those that are not meant, with their .json",
        )
    first, by_number = found[0], {note.part: note for note in found}
    for note in found:
        others = [name for name in _ALIKE if getattr(note, name) != getattr(first, name)]
        if others:
            raise DataError(
                f"all parts of {output} must be of the same "
                f"{', '.join(_ALIKE[name] for name in others)}",
                received=f"others in part {note.part} than in part {first.part}",
                mend=f"Make one of them again: {_command(first, note.part, '--overwrite')}",
            )
    parts = Part(1, first.parts).others
    missing = [
        part.number
        for part in parts
        if part.number not in by_number or not by_number[part.number].is_of(part.path_of(output))
    ]
    if missing:
        raise DataError(
            f"every part of {output} must be there whole",
            received=f"{len(missing):,} of {first.parts:,} missing or not as written: "
            f"{listed(map(str, missing), _SHOWN)}",
            mend=f"Make each: {_command(first, missing[0], '--resume')}",
        )
    notes = [by_number[part.number] for part in parts]
    _check_each_once(output, notes)
    return notes


def _check_each_once(output: Path, notes: Sequence[Note]) -> None:
    stop = 0
    for note in notes:
        if note.start != stop or note.stop <= note.start:
            raise DataError(
                f"each record must be in one part of {output}",
                received=f"records {note.start:,} to {note.stop:,} in part {note.part}, where "
                f"those from {stop:,} on are missing",
                mend="Make all parts again, with --overwrite",
            )
        stop = note.stop
    if stop != notes[0].of:
        raise DataError(
            f"each record must be in one part of {output}",
            received=f"{stop:,} of {notes[0].of:,}",
            mend="Make all parts again, with --overwrite",
        )


def _command(note: Note, number: int, how: str) -> str:
    return f"`{shlex.join(note.command)} --part {number}/{note.parts} {how}`"
