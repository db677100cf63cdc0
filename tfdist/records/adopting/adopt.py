"""Adopting TFRecord files that others wrote: a manifest is written, and nothing else."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfdist import __version__
from tfdist.errors import CorruptShardError, DataError, OptionError, spelt
from tfdist.records.adopting.choose import check_roles, choose
from tfdist.records.adopting.describe import Described, describe
from tfdist.records.adopting.feature_statistics import Found
from tfdist.records.adopting.file_patterns import Files, divide, find_files, other_splits
from tfdist.records.adopting.in_bucket import in_a_bucket_too
from tfdist.records.adopting.scan import Scanned, peek, scan
from tfdist.records.adopting.tfds import Folder, read_folder
from tfdist.records.buckets.urls import possible
from tfdist.records.format.checking import Fault
from tfdist.records.format.manifest import (
    ADOPTED,
    MANIFEST_NAME,
    Manifest,
    ShardInfo,
    SplitInfo,
    load_manifest,
)
from tfdist.records.format.offsets import OFFSETS_NAME, write_offsets
from tfdist.records.format.readings import notes_of_boxes, read_as_said
from tfdist.records.format.schema import Feature, Schema
from tfdist.records.wording import left_out, listed
from tfdist.records.writing.roles import Asked, Roles, parted
from tfdist.records.writing.shard_files import Counter

FAULTS_SHOWN = 20
# Enough to see what cannot be guessed before terabytes are read.
_PEEKED_RECORDS = 64
# Nobody has to hear of these.
_KNOWN_ENDS = (".json", ".labels.txt", ".md", ".txt", OFFSETS_NAME)

Progress = Callable[[int, int], None]
Tell = Callable[[str], None]


class DamagedFilesError(CorruptShardError):
    """Files that cannot be adopted.

    Attributes:
        faults: the first one of each file.
    """

    faults: tuple[Fault, ...] = ()


@in_a_bucket_too
def adopt(
    source: str | os.PathLike | Sequence[str | os.PathLike],
    out: str | os.PathLike | None = None,
    *,
    inputs: str | Sequence[str] | None = None,
    labels: str | Sequence[str] | None = None,
    weight: str | None = None,
    split: Mapping[str, str] | None = None,
    resize: str | tuple[int, int] | None = None,
    fit: str | None = None,
    color: str | None = None,
    max_length: int | str | None = None,
    classes: str | os.PathLike | Sequence[str] | None = None,
    first_class: int | None = None,
    progress: Progress | None = None,
    tell: Tell | None = None,
) -> Manifest:
    """Makes shards of TFRecord files that others wrote: reads them once, and writes a manifest.

    The files stay as they are and where they are. From then on they are shards like those of
    ``write``. Called again, it changes how they are read: with ``resize``, ``fit``, ``color`` and
    ``max_length`` alone, also of shards that ``write`` wrote, no record is looked at.

    Args:
        source: a folder, a pattern such as ``data/train-*``, a file, or several of them. Files that
            end in .gz or are compressed with gzip may be among them if all are. Or the URL of a
            folder in a bucket: its files are fetched to be read, and the manifest goes there.
        out: a new or empty folder for the manifest; None is that of the files.
        inputs: the keys of the inputs: one, several, or "a,b". None guesses what is clear.
        labels: those of the labels, likewise.
        weight: the key of the sample weight; one that is called sample_weight is one by itself.
        split: for each split the pattern of its files, {"train": ``part-*``}. None goes by the
            names of files and folders: train, validation (val, dev, eval) and test; else all are
            "train".
        resize: of all images, when they are read: "HxW" or (height, width); "none" leaves them as
            they are.
        fit: "stretch", "crop" or "pad": how images get to that size.
        color: "gray" or "rgb"; "none" leaves them as they are.
        max_length: entries of features of variable length, when they are read; "none" are as many
            as the longest record has.
        classes: the names of the classes, or a file with a line for each. None takes those of a
            TFDS folder.
        first_class: the smallest class id: it is subtracted from all when they are read.
        progress: called with (bytes read, bytes in all).
        tell: called with each thing that a user should know of what was taken, a sentence.

    Returns:
        The manifest.

    Raises:
        OptionError: an option that cannot hold.
        DataError: nothing that could be adopted, a manifest of another program, or features of
            which only the user can say what they are (then it lists all).
        CorruptShardError: files that are no TFRecord files of Examples, or damaged ones.
        WriteError: the manifest cannot be written.
    """
    tell = tell or (lambda text: None)
    reading = {"resize": resize, "fit": fit, "color": color, "max_length": max_length}
    x, y = (None if names is None else [*filter(None, parted(names))] for names in (inputs, labels))
    said = Asked(inputs=x, label=y, weight=weight)
    if first_class is not None and type(first_class) is not int:
        raise OptionError(
            "first_class must be a whole number",
            received=repr(first_class),
            mend=f"Give the smallest class id, such as {spelt('first_class', 1)}",
        )
    is_by_pattern = isinstance(split, Mapping) and all(isinstance(p, str) for p in split.values())
    if split is not None and not is_by_pattern:
        raise OptionError(
            "split must be a dict with the pattern of the files of each split",
            received=repr(split),
            mend="Write split={'train': 'part-*'}",
        )
    names = _class_names(classes)
    given = [source] if isinstance(source, str | os.PathLike) else list(source)
    for place in (*given, *([] if out is None else [out])):
        possible(place)
    home = _home(given, out)
    before = None if home is None else _manifest_of(home)
    is_new = said.names_columns or any(it is not None for it in (split, names, first_class))
    if before is None:
        files = find_files(given)
    else:
        if out is not None:
            _check_same_files(given, home, before)
        if not is_new:
            return _read_otherwise(home, before, reading, tell)
        if not before.is_adopted:
            raise DataError(
                f"only how the shards of {home} are read can be changed, which must be said with "
                "resize, fit, color or max_length",
                received="options for files that others wrote",
                mend="Leave them out",
            )
        said = _as_before(said, before)
        out, files = home, _files_again(before.shard_folder(home), before)
    folder = files.folder if out is None else _new_folder(Path(out), before)
    if out is None and os.path.lexists(folder / MANIFEST_NAME):
        _manifest_of(folder)  # Raises when it is foreign.
        raise DataError(
            f"{folder} must not have a {MANIFEST_NAME} yet, when some of its files are adopted",
            received="one of tfdist",
            mend=f"Write the manifest elsewhere with {spelt('out')}, or name the folder: "
            f"tfdist adopt {folder}",
        )
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise _not_writable(folder, "one that is not")
    told = read_folder(files.folder)
    if before is None or split is not None:
        splits, notes = divide(files, split, told.name)
    else:
        splits, notes = _splits_of(before, files)
    aside = [name for name in files.aside if not name.endswith(_KNOWN_ENDS)]
    if aside:
        notes.append(f"{len(aside):,} other files are left aside: {listed(aside)}")
    scanned = _scan(files, splits, said, told, progress)
    used, empty = _without_empty(splits, scanned)
    if empty:
        notes.append(left_out(len(empty), "file", "without a record", empty))
    found: dict[str, Found] = {}
    mixed: dict[str, str] = {}
    for item in scanned.values():
        for key, of_file in item.found.items():
            of_all = found.setdefault(key, Found(of_file.in_list))
            if of_all.in_list != of_file.in_list:
                mixed.setdefault(key, item.name)
            of_all.add(of_file)
    records = sum(item.records for item in scanned.values())
    described = _described(found, records, told)
    place = str(files.folder)
    chosen = choose(place, described, said, told)
    for key in (name for name in chosen.used if name in mixed):
        raise DataError(
            f"'{key}' of {place} must be a feature in all files, or a feature list in all",
            received=f"one in {mixed[key]}, where files before have the other",
            mend=f"Adopt them apart, with {spelt('out')}",
        )
    check_roles(place, chosen, described, scanned)
    if chosen.weight is not None:
        _check_weights(chosen.weight, scanned)
    schema, more = _schema(chosen, described, names, first_class, before)
    notes += more
    schema = read_as_said(schema, reading)
    notes += notes_of_boxes(schema)
    notes += [
        f"the images of '{feature.name}' differ in size: say in which they are read, "
        f"`tfdist adopt {folder} --resize 224x224`"
        for feature in schema.features
        if feature.is_image and None in feature.read_shape
    ]
    manifest = Manifest(
        schema=schema,
        splits={name: _split(schema, scanned, shards) for name, shards in used.items()},
        layout=None,
        source=ADOPTED,
        seed=0,
        stratified=False,
        compression="gzip" if any(item.is_gzip for item in scanned.values()) else "none",
        written_by=f"tfdist {__version__}",
        shards_in=None if folder == files.folder else _from(folder, files.folder),
    )
    Manifest.from_json(manifest.to_json())  # What could not be read again is not written.
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(folder, str(error)) from error
    manifest.put(folder)
    # A help only: without it the frames tell where records begin.
    with contextlib.suppress(OSError):
        write_offsets(folder, manifest, {name: item.lengths for name, item in scanned.items()})
    for note in notes:
        tell(note)
    return manifest


# What is there already ------------------------------------------------------------------------


def _home(given: Sequence[Any], out: Any) -> Path | None:
    """Returns the folder that the manifest is in, or would be, where that is clear at once."""
    if out is not None:
        return Path(out)
    return Path(given[0]) if len(given) == 1 and Path(given[0]).is_dir() else None


def _manifest_of(folder: Path) -> Manifest | None:
    """Returns the manifest of a folder; None when there is none.

    Raises:
        DataError: there is one that tfdist did not write, or a damaged one.
    """
    if not os.path.lexists(folder / MANIFEST_NAME):
        return None
    try:
        return load_manifest(folder)
    except DataError as error:
        raise DataError(
            f"{folder / MANIFEST_NAME} must be one of tfdist's, as another is never written over",
            received=error.rule if error.received is None else f"{error.rule}: {error.received}",
            mend=f"Write the manifest elsewhere with {spelt('out', 'FOLDER')}",
        ) from None


def _check_same_files(given: Sequence[Any], home: Path, before: Manifest) -> None:
    """Raises DataError where files are named that the manifest in ``home`` is not of."""
    if len(given) == 1 and os.path.realpath(given[0]) == os.path.realpath(home):
        return
    # A folder may have files that are not called as shards, which were named by a pattern.
    is_folder = len(given) == 1 and Path(given[0]).is_dir()
    named = os.path.realpath(given[0] if is_folder else find_files(given).folder)
    known = os.path.realpath(home / (before.shards_in or ""))
    if os.path.commonpath([named, known]) != known:
        raise DataError(
            f"{home} must have no manifest yet, or that of the files that are adopted",
            received=f"one of the files in {known}",
            mend=f"Choose a new folder with {spelt('out', 'FOLDER')}",
        )


def _read_otherwise(
    home: Path, before: Manifest, reading: Mapping[str, Any], tell: Tell
) -> Manifest:
    if all(value is None for value in reading.values()):
        tell(
            f"{home} has a manifest of tfdist already, and nothing was changed; say how its "
            f"records are read with {spelt('resize')}, {spelt('color')} or {spelt('max_length')}"
        )
        return before
    manifest = replace(before, schema=read_as_said(before.schema, reading))
    if manifest == before:
        tell(f"{home} is read so already, and nothing was changed")
        return before
    manifest.put(home)
    for note in notes_of_boxes(manifest.schema):
        tell(note)
    tell("the manifest was written anew, no record was touched")
    return manifest


def _as_before(said: Asked, before: Manifest) -> Asked:
    """Returns what is said now, and where nothing is, what was taken before."""
    taken = {*(said.inputs or ()), *(said.label or ()), said.weight}
    left = [feature for feature in before.schema.features if feature.name not in taken]
    x, y, weights = ([f.name for f in left if f.role == r] for r in ("input", "label", "weight"))
    return Asked(
        inputs=said.inputs or x or None,
        label=said.label if said.label is not None else y,
        weight=said.weight or next(iter(weights), None),
    )


def _files_again(folder: Path, before: Manifest) -> Files:
    """Returns the files that were adopted, whatever they are called, and those beside them."""
    known = [shard.file for split in before.splits.values() for shard in split.shards]
    try:
        found = find_files(folder)
    except DataError:
        found = Files(folder, ())
    others = tuple(name for name in known if name not in found.names)
    aside = tuple(name for name in found.aside if name not in others)
    return Files(folder, (*found.names, *others), aside)


def _splits_of(before: Manifest, files: Files) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the files as they were divided before, and what is to be said of others."""
    splits = {name: [shard.file for shard in split.shards] for name, split in before.splits.items()}
    known = {name for names in splits.values() for name in names}
    others = [name for name in files.names if name not in known]
    if not others:
        return splits, []
    return splits, [
        f"{len(others):,} files that were not adopted before are left aside: {listed(others)}; "
        f"to take them, say which they are with {other_splits()}"
    ]


def _not_writable(folder: Path, received: str) -> DataError:
    return DataError(
        f"{folder} must be writable",
        received=received,
        mend=f"Write the manifest elsewhere with {spelt('out', 'FOLDER')}",
    )


def _new_folder(out: Path, before: Manifest | None) -> Path:
    if before is None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(
            "the manifest of files elsewhere must be written to a new or empty folder",
            received=f"{out}, which {'holds something' if out.is_dir() else 'is a file'}",
            mend="Choose another folder",
        )
    return out


def _from(folder: Path, shards: Path) -> str:
    """Returns where the shards are, from the manifest; as a full path where they share no folder.

    What lies together is moved together.
    """
    here, there = Path(os.path.realpath(folder)), Path(os.path.realpath(shards))
    if len(Path(os.path.commonpath([here, there])).parts) > 1:
        return os.path.relpath(there, here)
    return str(there)


# What is in the files -------------------------------------------------------------------------


def _scan(
    files: Files,
    splits: Mapping[str, list[str]],
    said: Asked,
    told: Folder,
    progress: Progress | None,
) -> dict[str, Scanned]:
    names = [name for shards in splits.values() for name in shards]
    wanted = None
    peeked = peek(files.folder, names[0], _PEEKED_RECORDS)
    if peeked:
        described = _described(peeked, max(item.records for item in peeked.values()), told)
        asked = {*(said.inputs or ()), *(said.label or ()), *filter(None, [said.weight])}
        if asked <= set(described):  # What is not among the first may come later.
            wanted = {*choose(str(files.folder), described, said, told).used}
    # What is wrong with one is told where it is read.
    paths = filter(os.path.isfile, (files.folder / name for name in names))
    count = Counter(0 if progress is None else sum(map(os.path.getsize, paths)), progress).add
    scanned = {item.name: item for item in scan(files.folder, names, wanted, count)}
    faults = [item.fault for item in scanned.values() if item.fault is not None]
    faults += _wrong_lengths(splits, scanned, told)
    if len({item.is_gzip for item in scanned.values() if item.bytes}) > 1 and not faults:
        some = next(item.name for item in scanned.values() if item.is_gzip)
        other = next(item.name for item in scanned.values() if not item.is_gzip)
        raise DataError(
            f"all files of {files.folder} must be compressed with gzip, or none",
            received=f"{some}, which is, and {other}, which is not",
            mend=f"Adopt them apart, with {spelt('out')}",
        )
    if faults:
        raise _damaged(files.folder, faults)
    return scanned


def _described(found: Mapping[str, Found], records: int, told: Folder) -> dict[str, Described]:
    return {
        name: describe(name, item, records, told.features.get(name))
        for name, item in sorted(found.items())
    }


def _wrong_lengths(
    splits: Mapping[str, list[str]], scanned: Mapping[str, Scanned], told: Folder
) -> list[Fault]:
    """Returns the files that have not as many records as the dataset says."""
    faults = []
    for split, lengths in told.shard_lengths.items():
        shards = splits.get(split, ())
        if len(shards) != len(lengths):
            continue
        for name, length in zip(shards, lengths, strict=True):
            item = scanned[name]
            if item.fault is None and item.records != length:
                reason = f"has {item.records} records, dataset_info.json says {length}"
                faults.append(Fault(name, None, None, reason))
    return faults


def _damaged(folder: Path, faults: Sequence[Fault]) -> DamagedFilesError:
    listed = "; ".join(map(str, faults[:FAULTS_SHOWN]))
    more = len(faults) - FAULTS_SHOWN
    error = DamagedFilesError(
        f"all files that are adopted from {folder} must be whole TFRecord files of Examples",
        received=f"{len(faults):,} that {'is' if len(faults) == 1 else 'are'} not: {listed}"
        + (f"; and {more:,} more" if more > 0 else ""),
        mend=f"Get them again, or take the others alone with {other_splits()}",
    )
    error.faults = tuple(faults)
    return error


def _without_empty(
    splits: Mapping[str, list[str]], scanned: Mapping[str, Scanned]
) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the files that have records, and the names of those that have none."""
    used = {
        split: [name for name in names if scanned[name].records] for split, names in splits.items()
    }
    empty = [name for names in splits.values() for name in names if not scanned[name].records]
    for split, names in used.items():
        if not names:
            raise DataError(
                f"split '{split}' must have at least one record",
                received="none",
                mend=f"Get its files again, or take the others alone with {other_splits()}",
            )
    return used, empty


# What becomes of it ---------------------------------------------------------------------------


def _schema(
    chosen: Roles,
    described: Mapping[str, Described],
    classes: tuple[str, ...] | None,
    first_class: int | None,
    before: Manifest | None,
) -> tuple[Schema, list[str]]:
    notes = []
    if chosen.guess is not None:
        labels = f", {', '.join(chosen.labels)} as the label" if chosen.labels else ", no label"
        notes.append(
            f"read are {', '.join(chosen.inputs)} as the input{labels} (guessed: {chosen.guess}); "
            f"name others with {spelt('inputs', flag='--input')} and "
            f"{spelt('labels', flag='--label')}"
        )
    elif not chosen.labels:
        notes.append(f"no label is read; name one with {spelt('labels', flag='--label')}")
    roles = {**dict.fromkeys(chosen.inputs, "input"), **dict.fromkeys(chosen.labels, "label")}
    earlier = {} if before is None else {f.name: f for f in before.schema.features}
    features = []
    for name in chosen.used:
        item = described[name]
        notes += item.notes
        if count := item.found.unfinite:
            notes.append(f"{count:,} records have NaN or infinite values in '{name}'")
        feature = item.feature(roles.get(name, "weight"))
        features.append(_read_as_before(feature, earlier.get(name)))
    schema = Schema(tuple(features))
    label = schema.class_label
    if label is None:
        if classes is not None or first_class is not None:
            raise DataError(
                "classes and first_class must be said of records with one label of class ids",
                received=f"labels {', '.join(chosen.labels) or 'none'}",
                mend="Leave them out",
            )
        return schema, notes
    ids = described[label.name].found.class_counts
    offset = label.reading.offset if first_class is None else first_class
    known = earlier.get(label.name)
    names = classes or (None if known is None else known.classes) or label.classes
    label = replace(label, classes=names, reading=replace(label.reading, offset=offset))
    _check_ids(label, ids)
    if ids and min(ids) == 1 and offset == 0:
        notes.append(
            f"the smallest class id of '{label.name}' is 1, and none is 0: if classes are numbered "
            f"from 1, adopt again with {spelt('first_class', 1)}, which subtracts it when records "
            "are read"
        )
    if ids is None:
        notes.append(f"'{label.name}' has too many different values to count its classes")
    features = (label if feature.name == label.name else feature for feature in schema.features)
    return Schema(tuple(features)), notes


def _read_as_before(feature: Feature, before: Feature | None) -> Feature:
    """Returns the feature with the reading that was chosen earlier, where it still fits."""
    kind = (feature.is_image, feature.is_ragged)
    if before is None or (before.is_image, before.is_ragged) != kind:
        return feature
    # That is found in the files, and no choice.
    reading = replace(before.reading, upright=feature.reading.upright)
    if feature.role != before.role:
        reading = replace(reading, offset=0)  # That of class ids.
    return replace(feature, reading=reading)


def _check_weights(weight: str, scanned: Mapping[str, Scanned]) -> None:
    """Raises DataError for a sample weight that is below 0, NaN or infinite."""
    for name, item in scanned.items():
        odd = item.found[weight].no_weight if item.records else None
        if odd is not None:
            raise DataError(
                "a sample weight must be 0 or more, and finite",
                received=f"{odd[1]} in '{weight}' of {name}, record {odd[0]}",
                mend="Write these records anew, or take the files without such with "
                f"{other_splits()}",
            )


def _check_ids(label: Feature, ids: collections.Counter[int] | None) -> None:
    if not ids:
        return
    smallest, largest = min(ids) - label.reading.offset, max(ids) - label.reading.offset
    if smallest < 0:
        raise DataError(
            "integer labels must be class ids, 0 or more",
            received=f"{min(ids)} in '{label.name}'"
            + (f", and first class {label.reading.offset}" if label.reading.offset else ""),
            mend=f"If classes are numbered from there, say {spelt('first_class', min(ids))}",
        )
    if label.classes is not None and largest >= len(label.classes):
        raise DataError(
            f"integer labels must be class ids, in 0 to {len(label.classes) - 1}",
            received=f"{largest} in '{label.name}'",
            mend=f"Name all classes, or say with {spelt('first_class')} where their numbers begin",
        )


def _split(schema: Schema, scanned: Mapping[str, Scanned], names: Sequence[str]) -> SplitInfo:
    label = schema.class_label
    counts: collections.Counter[int] | None = collections.Counter()
    for name in names:
        found = None if label is None else scanned[name].found.get(label.name)
        of_file = None if found is None else found.class_counts
        counts = None if counts is None or of_file is None else counts + of_file
    offset = 0 if label is None else label.reading.offset
    return SplitInfo(
        shards=tuple(
            ShardInfo(
                file=name,
                records=scanned[name].records,
                bytes=scanned[name].bytes,
                checksum=scanned[name].checksum,
            )
            for name in names
        ),
        class_counts=None
        if counts is None
        else {class_id - offset: number for class_id, number in sorted(counts.items())},
    )


def _class_names(classes: Any) -> tuple[str, ...] | None:
    if classes is None:
        return None
    try:
        if not isinstance(classes, str | os.PathLike):
            return tuple(classes)
        lines = Path(classes).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, TypeError, ValueError) as error:
        raise OptionError(
            "classes must be a text file with a name in each line, or a list of names",
            received=f"{classes}, which cannot be read ({error})",
            mend=f"Name a file in UTF-8: {spelt('classes', 'names.txt')}",
        ) from None
    return tuple(line.strip() for line in lines if line.strip())
