"""What a folder of TensorFlow Datasets says of its records, in features.json and its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist.errors import read_json
from tfdist.records.format.schema import RAW_DTYPES

FEATURES_NAME = "features.json"
INFO_NAME = "dataset_info.json"
_LABELS_SUFFIX = ".labels.txt"

Shape = tuple["int | None", ...]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is said of one feature.

    Attributes:
        shape: None in it is a size that differs from record to record.
        channels: of an image; None for anything else.
        as_bytes: whether an array is stored as its bytes.
        classes: the names of class ids.
    """

    shape: Shape | None = None
    dtype: str | None = None
    channels: int | None = None
    as_bytes: bool = False
    classes: tuple[str, ...] | None = None

    @property
    def is_raw(self) -> bool:
        known = self.shape is not None and None not in self.shape
        return self.as_bytes and known and self.dtype in RAW_DTYPES


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of TensorFlow Datasets; empty where it is none.

    Attributes:
        name: of the dataset: that with which the names of its files begin.
        features: by key, what is said of it.
        inputs, labels, weight: the keys of what it calls supervised.
        shard_lengths: by split, the records of each of its files.
    """

    name: str | None = None
    features: Mapping[str, Told] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    weight: str | None = None
    shard_lengths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def read_folder(folder: Path) -> Folder:
    """Returns what a folder says; whatever of it is missing or not understood says nothing."""
    features = _json(folder / FEATURES_NAME)
    info = _json(folder / INFO_NAME)
    told = dict(_flat("", _root(features), (), folder)) if features else {}
    inputs, labels, weight = _supervised(info, told)
    return Folder(
        name=info.get("name") if isinstance(info.get("name"), str) else None,
        features=told,
        inputs=inputs,
        labels=labels,
        weight=weight,
        shard_lengths=_lengths(info),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _root(value: dict[str, Any]) -> dict[str, Any]:
    if isinstance(value.get("content"), str):  # Of the years before 2022.
        try:
            return {"featuresDict": read_json(value["content"])}
        except ValueError:
            return {}
    return value


def _flat(key: str, value: Any, outer: Shape, folder: Path) -> Iterator[tuple[str, Told]]:
    """Yields (key, what is said of it) of the leaves; nested keys are joined by "/"."""
    if not isinstance(value, dict):
        return
    inner = value.get("featuresDict")
    if isinstance(inner, dict) and isinstance(inner.get("features"), dict):
        for name, item in inner["features"].items():
            yield from _flat(f"{key}/{name}" if key else name, item, outer, folder)
    elif isinstance(value.get("sequence"), dict):
        sequence = value["sequence"]
        length = _size(sequence.get("length", -1))
        yield from _flat(key, sequence.get("feature"), (*outer, length), folder)
    elif isinstance(value.get("image"), dict) and not outer:
        shape = _shape(value["image"])
        channels = shape[2] if shape is not None and len(shape) == 3 else None
        yield key, Told(channels=channels, dtype=value["image"].get("dtype"))
    elif "classLabel" in value:
        # The dtype is always int64, and the shape is that of what is around it.
        yield key, Told(shape=outer, dtype="int64", classes=_labels(folder, key))
    elif isinstance(value.get("tensor"), dict):
        tensor = value["tensor"]
        shape = _shape(tensor)
        whole = None if shape is None else (*outer, *shape)
        as_bytes = str(tensor.get("encoding", "none")).lower() == "bytes"
        yield key, Told(shape=whole, dtype=tensor.get("dtype"), as_bytes=as_bytes)
    elif isinstance(value.get("boundingBox"), dict):
        yield key, Told(shape=(*outer, 4), dtype="float32")
    elif "text" in value:
        yield key, Told(shape=outer)


def _shape(value: Mapping[str, Any]) -> Shape | None:
    shape = value.get("shape", {})
    sizes = shape.get("dimensions", []) if isinstance(shape, dict) else None
    return tuple(_size(size) for size in sizes) if isinstance(sizes, list) else None


def _size(value: Any) -> int | None:
    """Sizes are strings there, and "-1" is any."""
    try:
        size = int(value)
    except (TypeError, ValueError):
        return None
    return size if size > 0 else None


def _labels(folder: Path, key: str) -> tuple[str, ...] | None:
    try:
        text = (folder / f"{key.replace('/', '-')}{_LABELS_SUFFIX}").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return tuple(line.strip() for line in text.splitlines() if line.strip()) or None


def _supervised(
    info: Mapping[str, Any], told: Mapping[str, Told]
) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
    keys = info.get("supervisedKeys")
    if not isinstance(keys, dict):
        return (), (), None
    named = [keys.get("input"), keys.get("output"), None]
    if isinstance(keys.get("tuple"), dict):
        items = keys["tuple"].get("items", [])
        found = [item.get("featureKey") for item in items if isinstance(item, dict)]
        named = [*found, None, None, None][:3]
    x, y, weight = (name if name in told else None for name in named)
    return (x,) if x else (), (y,) if y else (), weight


def _lengths(info: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    splits = info.get("splits")
    lengths = {}
    for split in splits if isinstance(splits, list) else ():
        try:
            lengths[split["name"]] = tuple(int(n) for n in split["shardLengths"])
        except (KeyError, TypeError, ValueError):
            continue
    return lengths
