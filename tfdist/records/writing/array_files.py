"""Arrays in files: .npy, a folder of them, .npz. Large ones stay in their files while written."""

from __future__ import annotations

import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.clients.partition import take_column
from tfdist.records.format.columns import Columns, check_lengths, from_arrays
from tfdist.records.format.large_arrays import LargeArray, large
from tfdist.records.format.splits import SPLIT_WORDS
from tfdist.records.wording import told_as
from tfdist.records.writing.object_arrays import RefusedError, read_objects
from tfdist.records.writing.roles import Asked, assign, parted

# A member of an archive up to this size is read into memory.
_SMALL_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
# A RuntimeError is of an archive with a password, or packed in a way that is not known.
_UNREADABLE = (ValueError, zipfile.BadZipFile, EOFError, OSError, RuntimeError, zlib.error)
_LIKE_AN_INPUT = re.compile(r"(x|inputs?|features?)(\d|[ _.-]|$)", re.IGNORECASE)

# "x_train" and "train_images", as Keras' and other data sets call the arrays of each split.
_SPLIT = f"(?P<split>{'|'.join(SPLIT_WORDS)})"
_OF_A_SPLIT = re.compile(f"(?P<part>.+)_{_SPLIT}|{_SPLIT.replace('split', 'first')}_(?P<rest>.+)")


def from_npz(path: Path, asked: Asked) -> Columns:
    """Returns the records of an archive. Members that are stored as they are stay in the file.

    Raises:
        DataError: it is no archive, or one of Python objects.
    """
    arrays, notes, name = {}, [], None
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name in arrays:
                    raise ValueError(f"two arrays are called '{name}'")
                arrays[name], unpacked = _member(path, archive, info)
                if unpacked:
                    notes.append(
                        f"array '{name}' was unpacked to a temporary file of "
                        f"{arrays[name].nbytes / 1e9:.1f} GB while it was written"
                    )
    except _UNREADABLE as error:
        raise DataError(
            f"{path} must be an archive of numeric arrays, as numpy.savez writes it",
            received=f"an error: {error}" if name is None else f"an error in '{name}': {error}",
            mend="Write it again with numpy.savez, or get it again if it was cut",
        ) from None
    columns = from_named("npz", str(path), arrays, asked)
    return replace(columns, notes=(*columns.notes, *notes))


def from_npy(path: Path) -> Columns:
    """Returns the records of one array, which are inputs without a label."""
    columns = from_arrays("npy", {"x": _mapped(path)}, {})
    note = "the records have no label; a folder of x.npy and y.npy has"
    return replace(columns, notes=(*columns.notes, note))


def npy_files(folder: Path) -> list[Path]:
    """Returns the arrays of a folder that holds nothing else; none of any other folder."""
    files = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    are_arrays = all(path.suffix.lower() == ".npy" and path.is_file() for path in files)
    return files if are_arrays else []


def from_npy_folder(folder: Path, asked: Asked) -> Columns:
    """Returns the records of the arrays NAME.npy of a folder, which are called NAME."""
    arrays = {path.stem: _mapped(path) for path in npy_files(folder)}
    return from_named("npy", str(folder), arrays, asked)


def from_named(kind: str, place: str, arrays: Mapping[str, Any], asked: Asked) -> Columns:
    """Returns the records of arrays by name, whose roles are asked for or seen by their names.

    Arrays "x_train", "y_train", "x_test", ... are the splits train, test and validation of an
    input "x" and a label "label"; those called "train_images" and so on likewise.

    Raises:
        DataError: arrays of which only the user can say what they are, or that cannot be written.
    """
    said = {*parted(asked.label), *parted(asked.inputs), *parted(asked.drop)}
    names_parts = asked.names_columns and not said & set(arrays)
    divided = _divided(arrays) if names_parts or not asked.names_columns else None
    splits = None
    if divided is not None:
        arrays, splits = _joined(place, divided)
    roles = assign(place, "array", list(arrays), asked, doubtful=_like_labels(arrays))
    client = {roles.client} - {None, *roles.labels}
    inputs = {name: arrays[name] for name in (*roles.inputs, *client)}
    labels = {name: arrays[name] for name in roles.labels}
    if divided is not None and roles.labels == ("y",) and roles.client != "y":
        labels = {"label": arrays["y"]}
    weights = {} if roles.weight is None else {roles.weight: arrays[roles.weight]}
    columns = owned(kind, inputs, labels, weights, asked.client)
    return replace(columns, roles=roles.listed(list(arrays)), splits=splits)


def owned(
    kind: str,
    inputs: Mapping[str, Any],
    labels: Mapping[str, Any],
    weights: Mapping[str, Any],
    client: str | None,
) -> Columns:
    """Returns the records of arrays, and whose they are when a column names their clients."""
    owners = None
    if client is not None:
        owners, inputs = take_column(client, inputs, labels)
    columns = from_arrays(kind, inputs, labels, weights)
    if owners is not None:
        check_lengths({client: len(owners), "records": columns.num_records})
    return replace(columns, owners=owners)


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[Any, bool]:
    """Returns an array of an archive, and whether it had to be unpacked to a file."""
    with archive.open(info) as file:
        shape, is_fortran, dtype = _header(file)
        start = file.tell()
        if dtype.hasobject:
            return _objects(path, file, shape, dtype, info.filename.removesuffix(".npy")), False
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if num_bytes <= _SMALL_BYTES:
            file.seek(0)
            return np.lib.format.read_array(file, allow_pickle=False), False
        order = "F" if is_fortran else "C"
        if info.compress_type == zipfile.ZIP_STORED:
            while file.read(_PIECE_BYTES):  # Its checksum is seen at the end alone.
                pass
            offset = _data_offset(path, info) + start
            return np.memmap(path, dtype, "r", offset, shape, order), False
        # Its name is gone at once, and the file with the last that reads it.
        with tempfile.NamedTemporaryFile(prefix="tfdist-") as unpacked:
            shutil.copyfileobj(file, unpacked, _PIECE_BYTES)
            unpacked.flush()
            array = np.memmap(unpacked.name, dtype, "r", 0, shape, order)
            return large(array) or array, True


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Returns shape, whether it is in Fortran's order, and dtype of an array in a file."""
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise ValueError(f"an array of the format {version}")
    return read(file)


def _data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Returns where the bytes of a member begin; its local header has lengths of its own."""
    with open(path, "rb") as file:
        file.seek(info.header_offset + 26)
        lengths = file.read(4)
    name, extra = (int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
    return info.header_offset + 30 + name + extra


def _mapped(path: Path) -> np.ndarray:
    rule = f"{path} must be an array, as numpy.save writes it"
    mend = "Write it again with numpy.save, or get it again if it was cut"
    with told_as(rule, mend, *_UNREADABLE), open(path, "rb") as file:
        shape, _, dtype = _header(file)
        if dtype.hasobject:
            return _objects(path, file, shape, dtype)
        return np.load(path, mmap_mode="r", allow_pickle=False)


def _objects(
    path: Path, file: Any, shape: tuple[int, ...], dtype: np.dtype, name: str | None = None
) -> np.ndarray:
    """Returns an array of rows of unequal lengths, or of text; nothing in the file is run."""
    of = "" if name is None else f" in '{name}'"
    picked = "" if name is None else f"['{name}'], and so on, as (x, y)"
    try:
        if dtype.kind != "O":
            raise RefusedError(f"records of dtype {dtype}")
        return read_objects(file, shape)
    except RefusedError as error:
        raise DataError(
            f"{path} must hold numbers or text, in arrays or in a list for each record",
            received=f"{error}{of}",
            mend="A pickle can run any program, so no other is read: save rows of one length, text "
            "as dtype str, and rows of unequal lengths as lists, one a line, in a .jsonl file; of "
            "a file that you trust, tfdist.records.write takes "
            f"numpy.load(file, allow_pickle=True){picked}",
        ) from None


def _like_labels(arrays: Mapping[str, Any]) -> set[str]:
    """Returns the arrays of one number a record that are not called as inputs are."""
    return {
        name
        for name, array in arrays.items()
        if array.ndim == 1 and not _LIKE_AN_INPUT.match(name) and not _has_rows(array)
    }


def _has_rows(array: Any) -> bool:
    """Whether the records of an array of objects are lists or arrays."""
    return array.dtype.kind == "O" and len(array) > 0 and np.ndim(array[0]) > 0


def _divided(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """Returns by split the arrays by part; None unless all are arrays of two splits or more."""
    divided: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        found = _OF_A_SPLIT.fullmatch(name)
        if found is None or array.ndim == 0:
            return None
        split = SPLIT_WORDS[found["split"] or found["first"]]
        parts, part = divided.setdefault(split, {}), found["part"] or found["rest"]
        if part in parts:
            raise DataError(
                f"split '{split}' must have one array '{part}'",
                received=f"{name} beside another that is called so",
                mend="Rename one of them",
            )
        parts[part] = array
    return divided if len(divided) > 1 and "train" in divided else None


def _joined(
    place: str, divided: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns arrays of the records of all splits, and the numbers of those of each split."""
    first_split, first = next(iter(divided.items()))
    splits, start = {}, 0
    for split, parts in divided.items():
        if set(parts) != set(first):
            raise DataError(
                f"every split of {place} must have the same arrays",
                received=f"{', '.join(first)} in {first_split}, {', '.join(parts)} in {split}",
                mend="Add those that are missing, or remove those that one split alone has",
            )
        check_lengths({f"{part} of {split}": len(array) for part, array in parts.items()})
        number = len(next(iter(parts.values())))
        splits[split] = np.arange(start, start + number)
        start += number
    return {
        part: _chained(place, part, {name: divided[name][part] for name in divided})
        for part in first
    }, splits


def _chained(place: str, part: str, arrays: Mapping[str, np.ndarray]) -> Any:
    first_split, first = next(iter(arrays.items()))
    for split, array in arrays.items():
        is_text = first.dtype.kind in "SU" and array.dtype.kind == first.dtype.kind
        if array.shape[1:] != first.shape[1:] or not (is_text or array.dtype == first.dtype):
            raise DataError(
                f"array '{part}' of {place} must be alike in all splits",
                received=f"{first.dtype} {list(first.shape[1:])} in {first_split}, "
                f"{array.dtype} {list(array.shape[1:])} in {split}",
                mend="Convert them to one dtype and shape",
            )
    join = LargeArray if first.ndim > 1 and first.dtype.kind in "biuf" else np.concatenate
    return join(list(arrays.values()))
