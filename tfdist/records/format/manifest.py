"""manifest.json: what is in a folder of shards, and how each shard must look to be intact."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crc32c import crc32c

from tfdist.errors import DataError, read_json
from tfdist.records.buckets.cache import local_shards
from tfdist.records.format.files import open_regular, unreadable
from tfdist.records.format.schema import Schema
from tfdist.records.replacing import replacing

MANIFEST_NAME = "manifest.json"
# Version 2 has strings, features of variable length, and what becomes of them when they are read;
# what needs none of these is still written as version 1, which an older tfdist reads.
FORMAT_VERSIONS = (1, 2)
COMPRESSIONS = ("none", "gzip")
#: What the manifest of records that others wrote says of where they come from.
ADOPTED = "adopted"
# Of anything that is counted: sums of some of them stay 64-bit numbers.
_MOST = 1 << 48
# Of the frame around a record, see ``encoding``.
FRAME_BYTES = 16
_LONGEST_NAME_BYTES = 255
_SEQUENCE_EXAMPLE = "sequence_example"


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One file.

    Attributes:
        file: its name inside the folder; of adopted shards with folders in it, "train/a.tfrecord".
        records: number of records, >= 1.
        bytes: size of the file.
        checksum: crc32c of the bytes of the file, 8 hexadecimal digits.
        client: whose records they are; None when the split is not divided into clients.
        class_counts: of a client's shard, as in ``SplitInfo``.
    """

    file: str
    records: int
    bytes: int
    checksum: str
    client: str | None = None
    class_counts: Mapping[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        value = {
            "file": self.file,
            "records": self.records,
            "bytes": self.bytes,
            "checksum": self.checksum,
        }
        if self.client is not None:
            value |= {"client": self.client, "class_counts": _string_keys(self.class_counts)}
        return value


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """One split: its shards in the order that numbers its records.

    Attributes:
        class_counts: number of records of each class id that occurs; None without class ids.
        partition: how the records were dealt to clients, "dirichlet:0.3"; None without clients.
    """

    shards: tuple[ShardInfo, ...]
    class_counts: Mapping[int, int] | None = None
    partition: str | None = None

    @property
    def has_clients(self) -> bool:
        return self.shards[0].client is not None

    @property
    def clients(self) -> dict[str, tuple[ShardInfo, ...]]:
        """The shards of each client, in the order of their first shards; empty without clients."""
        grouped: dict[str, tuple[ShardInfo, ...]] = {}
        for shard in self.shards if self.has_clients else ():
            grouped[shard.client] = (*grouped.get(shard.client, ()), shard)
        return grouped

    @property
    def records(self) -> int:
        return sum(shard.records for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        value = {
            "records": self.records,
            "class_counts": _string_keys(self.class_counts),
            "shards": [shard.to_json() for shard in self.shards],
        }
        return value if self.partition is None else {"partition": self.partition, **value}


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one feature's values lie in the bytes of every record.

    Attributes:
        offset: first byte, counted from the start of the serialised Example.
        bytes: length.
        kind: "raw", "float" (packed float32), or "varint" (each value in ``bytes / values`` bytes).
    """

    offset: int
    bytes: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The byte layout that all records share, so that they can be sliced instead of parsed."""

    record_bytes: int
    slots: Mapping[str, Slot]

    @property
    def frame_bytes(self) -> int:
        """Bytes of a record in its frame."""
        return self.record_bytes + FRAME_BYTES


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that is known about a folder of shards.

    Attributes:
        layout: None when the records have no common byte layout (encoded images).
        mixing: how the records were shuffled, where not all at once.
        left_out: how many records of the source were not written, by reason.
        shards_in: where the shards are, from the folder of the manifest; None where they are in it.
    """

    schema: Schema
    splits: Mapping[str, SplitInfo]
    layout: Layout | None
    source: str
    seed: int
    stratified: bool
    compression: str
    written_by: str
    mixing: str | None = None
    shards_in: str | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        (folder / MANIFEST_NAME).write_text(self.to_text(), encoding="utf-8")

    def put(self, folder: Path) -> None:
        """Writes it whole, in the place of one that was there.

        Raises:
            WriteError: it cannot be written; what was there is untouched.
        """
        with (
            replacing(folder / MANIFEST_NAME) as temporary,
            open(temporary, "w", encoding="utf-8") as file,
        ):
            file.write(self.to_text())
            file.flush()
            os.fsync(file.fileno())

    def to_text(self) -> str:
        """Returns what is in the file."""
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"

    @property
    def is_adopted(self) -> bool:
        """Whether others wrote the records."""
        return self.source == ADOPTED

    def shard_folder(self, folder: Path) -> Path:
        """Returns the folder of the shards.

        Args:
            folder: of the manifest.

        Raises:
            DataError: it is not where the manifest says.
        """
        if self.shards_in is None:
            return folder
        shards = Path(os.path.normpath(Path(os.path.abspath(folder)) / self.shards_in))
        if not shards.is_dir():
            raise DataError(
                f"the shards of {folder / MANIFEST_NAME} must be in the folder that it names",
                received=f"no folder {shards}",
                mend="Move them back, or write a manifest of them where they are: "
                "`tfdist adopt FOLDER --out NEW_FOLDER`",
            )
        return shards

    def to_json(self) -> dict[str, Any]:
        value = {
            "format_version": 1 if self._is_plain else 2,
            "written_by": self.written_by,
            "source": self.source,
            "seed": self.seed,
            "stratified": self.stratified,
            "compression": self.compression,
            "schema": self.schema.to_json(),
            "layout": None if self.layout is None else asdict(self.layout),
            "splits": {name: split.to_json() for name, split in self.splits.items()},
        }
        if self.mixing is not None:
            value["mixing"] = self.mixing
        if self.shards_in is not None:
            value["shards_in"] = self.shards_in
        if self.left_out:
            value["left_out"] = dict(self.left_out)
        if self.schema.is_sequence_example:
            value["container"] = _SEQUENCE_EXAMPLE
        return {**value, "checksum": _checksum(value)}

    @property
    def _is_plain(self) -> bool:
        """Whether all that it says could be said in format version 1."""
        in_folders = any("/" in s.file for split in self.splits.values() for s in split.shards)
        return self.schema.is_plain and self.shards_in is None and not in_folders

    @classmethod
    def from_json(cls, value: Any) -> Manifest:
        """Returns the manifest that ``to_json`` described. Raises DataError for anything else."""
        version = _get(value, "format_version", int)
        if version not in FORMAT_VERSIONS:
            raise DataError(
                f"the manifest must be of format version {FORMAT_VERSIONS[0]} or "
                f"{FORMAT_VERSIONS[1]}, which this tfdist reads",
                received=f"version {version}, written by {value.get('written_by')}",
                mend="Write the shards again with this version, or read them with that one",
            )
        compression = _get(value, "compression", str)
        if compression not in COMPRESSIONS:
            raise DataError(
                f"compression must be one of {', '.join(COMPRESSIONS)}", received=compression
            )
        splits = _get(value, "splits", dict)
        if not splits:
            raise DataError("a manifest must have at least one split", received="none")
        schema = Schema.from_json(_get(value, "schema", list))
        layout = _layout_from_json(value.get("layout"), schema)
        container = _SEQUENCE_EXAMPLE if schema.is_sequence_example else None
        if value.get("container") != container:
            raise DataError(
                "the container must be that of the features",
                received=f"{value.get('container')!r}",
            )
        shards_in = None if value.get("shards_in") is None else _get(value, "shards_in", str)
        if shards_in is not None and not shards_in.isprintable():
            raise DataError("'shards_in' must be the path of a folder", received=repr(shards_in))
        read = {name: _split_from_json(name, split) for name, split in splits.items()}
        _check_files(read, None if compression != "none" else layout)
        written = value.get("checksum")  # None of an older tfdist.
        if written is not None and written != _checksum(value):
            raise DataError(
                "a manifest must be as it was written",
                received="something in it that was changed",
                mend='Write the shards again, or, if the change is yours, remove the "checksum"',
            )
        return cls(
            schema=schema,
            splits=read,
            layout=layout,
            source=_get(value, "source", str),
            seed=_get(value, "seed", int),
            stratified=_get(value, "stratified", bool),
            compression=compression,
            written_by=_get(value, "written_by", str),
            mixing=None if value.get("mixing") is None else _get(value, "mixing", str),
            shards_in=shards_in,
            left_out=_left_out_from_json(value.get("left_out", {})),
        )


def load_manifest(folder: str | Path) -> Manifest:
    """Returns the manifest of a folder of shards; of a URL, all of which is fetched.

    Raises:
        DataError: the folder or its manifest.json is missing, or is not one that tfdist wrote.
    """
    folder = local_shards(folder)
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise DataError(
            "data must be a folder of shards",
            received=f"{'the file' if folder.exists() else 'no folder'} {folder}",
            mend=_how_to_write(folder),
        )
    try:
        with open_regular(path) as file:
            value = json.loads(file.read().decode("utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # What cannot be shown cannot be used.
    except FileNotFoundError:
        rule = f"a folder of shards must have a {MANIFEST_NAME}"
        received = f"none in {folder}"
    except OSError as error:
        rule = f"{path} must be a file that can be read"
        received = f"one {unreadable(error)}"
    except (RecursionError, ValueError) as error:
        rule = f"{path} must be JSON"
        received = "too many levels" if isinstance(error, RecursionError) else str(error)
    else:
        try:
            return Manifest.from_json(value)
        except DataError as error:
            mend = error.mend or _how_to_write(folder)
            raise DataError(f"{path}: {error.rule}", received=error.received, mend=mend) from None
    raise DataError(rule, received=received, mend=_how_to_write(folder))


def splits_of(data: Any) -> tuple[Path, Mapping[str, SplitInfo]] | None:
    """Returns the folder and its splits, where ``data`` is a whole folder of shards, or its URL.

    Raises:
        DataError: its manifest.json is not one that tfdist wrote.
    """
    folder = local_shards(data) if isinstance(data, (str, Path)) else None
    if folder is None or not (folder / MANIFEST_NAME).is_file():
        return None
    return folder, load_manifest(folder).splits


def is_split_beside(path: Path) -> bool:
    """Whether a path is that of a split of the manifest beside it: of no folder, any name is.

    Files that others wrote may lie in a folder that is called as a split.
    """
    above = path.parent / MANIFEST_NAME
    if (path / MANIFEST_NAME).is_file() or not above.is_file():
        return False
    if not path.exists():
        return True
    try:
        return path.name in load_manifest(path.parent).splits
    except DataError:
        with contextlib.suppress(OSError, ValueError):
            value = read_json(above.read_text("utf-8"))
            if isinstance(value, dict) and "format_version" in value:
                raise  # Else it is of another program, and divides nothing.
        return False


def find_split(path: Path) -> tuple[Path, str, Manifest]:
    """Returns the folder, the split and the manifest of "DIR/SPLIT", or of DIR with one split.

    Raises:
        DataError: no such folder, manifest or split.
    """
    path = local_shards(path)
    if path.is_dir() and not is_split_beside(path):
        folder, split = path, None
    else:
        folder, split = path.parent, path.name
        if not (folder / MANIFEST_NAME).is_file():
            folder, split = path, None
    manifest = load_manifest(folder)
    known = ", ".join(str(folder / name) for name in manifest.splits)
    if split is None and len(manifest.splits) > 1:
        raise DataError(
            "one split must be chosen", received=f"only {folder}", mend=f"Choose one of {known}"
        )
    split = split or next(iter(manifest.splits))
    if split not in manifest.splits:
        raise DataError(
            "the split must be one that the manifest names",
            received=f"'{split}'",
            mend=f"Choose one of {known}",
        )
    return folder, split, manifest


def _how_to_write(folder: Path) -> str:
    """Returns how to get shards where there are none; never into what holds data of the user's."""
    if folder.is_file() or holds_only_others(folder):
        return f"Write shards of it into a new folder: `tfdist shard {folder} NEW_FOLDER`"
    is_free = not folder.exists() or not any(folder.iterdir())
    return f"Write shards with `tfdist shard SOURCE {folder if is_free else 'NEW_FOLDER'}`"


def holds_only_others(folder: Path) -> bool:
    """Whether a folder holds something, and nothing that tfdist wrote."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return bool(names) and not any(".tfrecord" in name or name == MANIFEST_NAME for name in names)


def _checksum(value: Mapping[str, Any]) -> str:
    """Returns the crc32c of all that a manifest says but its checksum, 8 hexadecimal digits."""
    others = {key: item for key, item in value.items() if key != "checksum"}
    text = json.dumps(others, sort_keys=True, separators=(",", ":"))
    return f"{crc32c(text.encode()):08x}"


def has_client_folders(root: Path) -> bool:
    """Whether ``root`` has a folder of shards for each client, and no manifest of its own."""
    if not root.is_dir() or (root / MANIFEST_NAME).is_file():
        return False
    return any((folder / MANIFEST_NAME).is_file() for folder in client_folders(root))


def client_folders(root: Path) -> list[Path]:
    """Returns the folders in ``root``, which are clients, sorted by name; without hidden ones."""
    return sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")


def _get(value: Any, key: str, kind: type) -> Any:
    found = value.get(key) if isinstance(value, Mapping) else None
    # type(), because True is an int to isinstance.
    if type(found) is not kind:
        raise DataError(f"'{key}' must be of type {kind.__name__}", received=repr(found))
    return found


def _at_least(value: Any, key: str, least: int) -> int:
    found = _get(value, key, int)
    if not least <= found <= _MOST:
        raise DataError(f"'{key}' must be at least {least}, and at most {_MOST}", received=found)
    return found


def _string_keys(counts: Mapping[int, int] | None) -> dict[str, int] | None:
    return None if counts is None else {str(key): count for key, count in counts.items()}


def _left_out_from_json(value: Any) -> dict[str, int]:
    counts = value.items() if isinstance(value, Mapping) else [("", 0)]
    if not all(
        why and why.isprintable() and type(n) is int and 0 < n <= _MOST for why, n in counts
    ):
        raise DataError("'left_out' must map reasons to numbers of records", received=repr(value))
    return dict(counts)


def _split_from_json(name: str, value: Any) -> SplitInfo:
    shards = tuple(_shard_from_json(item) for item in _get(value, "shards", list))
    if not shards:
        raise DataError(f"split '{name}' must have at least one shard", received="none")
    if len({shard.client is None for shard in shards}) > 1:
        raise DataError(
            f"all shards of split '{name}' must have a client, or none",
            received="some that have one",
        )
    split = SplitInfo(
        shards=shards,
        class_counts=_counts_from_json(f"split '{name}'", value.get("class_counts")),
        partition=None if value.get("partition") is None else _get(value, "partition", str),
    )
    if _get(value, "records", int) != split.records:
        raise DataError(
            f"the records of split '{name}' must be the sum over its shards",
            received=f"{value['records']} against {split.records}",
        )
    return split


def _shard_from_json(value: Any) -> ShardInfo:
    file, checksum = _get(value, "file", str), _get(value, "checksum", str)
    parts = file.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or not file.isprintable():
        raise DataError(
            "a shard must be a file name, without a folder that leads elsewhere",
            received=repr(file),
        )
    if max(len(part.encode()) for part in parts) > _LONGEST_NAME_BYTES:
        raise DataError("a shard must have a name that a file can have", received=repr(file))
    if not re.fullmatch("[0-9a-f]{8}", checksum):
        raise DataError(f"the checksum of {file} must have 8 hexadecimal digits", received=checksum)
    client = value.get("client")
    if client is not None and not _get(value, "client", str):
        raise DataError(f"the client of {file} must have a name", received=repr(client))
    return ShardInfo(
        file=file,
        records=_at_least(value, "records", 1),
        bytes=_at_least(value, "bytes", 1),
        checksum=checksum,
        client=client,
        class_counts=_counts_from_json(file, value.get("class_counts")),
    )


def _check_files(splits: Mapping[str, SplitInfo], layout: Layout | None) -> None:
    """Raises DataError for files that no writer makes.

    Args:
        layout: that of the bytes of the files; None when it does not show there.
    """
    shards = [shard for split in splits.values() for shard in split.shards]
    if len({shard.file for shard in shards}) != len(shards):
        raise DataError("each shard must be named once", received="a file that comes twice")
    for shard in shards if layout is not None else ():
        if shard.bytes != shard.records * layout.frame_bytes:
            raise DataError(
                f"{shard.file} must have {layout.frame_bytes} bytes for each record",
                received=f"{shard.bytes} bytes for {shard.records} records",
            )


def _counts_from_json(owner: str, counts: Any) -> dict[int, int] | None:
    try:
        if counts is None:
            return None
        read = {int(key): n for key, n in counts.items()}
        are_counts = all(type(n) is int and 0 <= n <= _MOST for n in read.values())
        # Class ids are whatever whole numbers of 64 bits the labels are.
        if are_counts and all(abs(class_id) < 1 << 63 for class_id in read):
            return read
    except (AttributeError, TypeError, ValueError):
        pass
    raise DataError(
        f"the class counts of {owner} must map class ids to numbers", received=repr(counts)
    )


def _layout_from_json(value: Any, schema: Schema) -> Layout | None:
    if value is None:
        return None
    record_bytes = _at_least(value, "record_bytes", 1)
    slots = {}
    for name, slot in _get(value, "slots", dict).items():
        slots[name] = Slot(
            offset=_at_least(slot, "offset", 0),
            bytes=_at_least(slot, "bytes", 1),
            kind=_get(slot, "kind", str),
        )
        if slots[name].kind not in ("raw", "float", "varint"):
            raise DataError(
                f"the slot of '{name}' must be raw, float or varint", received=slots[name]
            )
        if slots[name].offset + slots[name].bytes > record_bytes:
            raise DataError(
                f"the slot of '{name}' must lie inside the record", received=slots[name]
            )
    if set(slots) != {feature.name for feature in schema.features}:
        raise DataError("the layout must have one slot for each feature", received=sorted(slots))
    for feature in schema.features:
        slot = slots[feature.name]
        fits = (
            slot.bytes % feature.num_values == 0
            if slot.kind == "varint"
            else slot.bytes == feature.num_bytes
        )
        if not fits:
            raise DataError(
                f"the slot of '{feature.name}' must hold shape {list(feature.shape)}", received=slot
            )
    return Layout(record_bytes=record_bytes, slots=slots)
