"""Datasets of Hugging Face's ``datasets``, and builders of TensorFlow Datasets.

Both are told by what they have: neither package need be imported.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfdist.errors import DataError
from tfdist.records.format.splits import split_of_word
from tfdist.records.writing.roles import Asked
from tfdist.records.writing.streams.stream import Stream, Structure, image_like

_VALIDATION = {"validation", "valid", "val"}
_NUMBERS = ("int", "uint", "float", "bool")


def open_dataset(source: Any, asked: Asked) -> Stream:
    """Returns the records of a dataset, or those of each split of several.

    Images are the bytes of their files, where these are JPEG or PNG; a ClassLabel keeps the names
    of its classes.

    Raises:
        DataError: columns of which only the user can say what they are.
    """
    parts = dict(source) if isinstance(source, Mapping) else {None: source}
    called = [(isinstance(name, str) and split_of_word(name)) or name for name in parts]
    # Beside a validation, these stay splits of their own.
    apart = ("dev", "eval") if _VALIDATION & set(parts) else ()
    names = [name if name in apart else split for name, split in zip(parts, called, strict=True)]
    if len(set(names)) < len(names):
        raise DataError(
            "each split must have one dataset",
            received=", ".join(map(str, parts)),
            mend="Give those of one split together, as datasets.concatenate_datasets does",
        )
    parts = {name: _with_bytes(each) for name, each in zip(names, parts.values(), strict=True)}
    first = next(iter(parts.values()))
    # Of a stream the columns may be known by its first record alone.
    features = first.features or dict.fromkeys(next(iter(first), {}))
    structure = Structure.of(dict.fromkeys(features), asked, "dataset")
    lengths = [len(each) if hasattr(each, "__len__") else None for each in parts.values()]
    return structure.stream(
        "huggingface",
        ((split, _records(part, structure.names)) for split, part in parts.items()),
        classes={
            name: tuple(feature.names)
            for name, feature in features.items()
            if name in structure.labels and hasattr(feature, "names")
        },
        dtypes={name: dtype for name in features if (dtype := _dtype(features[name]))},
        total=None if None in lengths else sum(lengths),
        splits=tuple(parts) if isinstance(source, Mapping) else None,
    )


def _records(part: Any, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for record in part:
        yield {name: _image_bytes(record[name]) for name in names if name in record}


def _with_bytes(dataset: Any) -> Any:
    """Returns the dataset with the files of its images, which it would decode otherwise."""
    for name, feature in (dataset.features or {}).items():
        if type(feature).__name__ == "Image":
            dataset = dataset.cast_column(name, type(feature)(decode=False))
    return dataset


def _image_bytes(value: Any) -> Any:
    if not (isinstance(value, Mapping) and set(value) == {"bytes", "path"}):
        return value
    data, path = value["bytes"], value["path"]
    if data is None and path is not None:
        data = Path(path).read_bytes()
    if data is None or image_like(data):
        return data
    from tfdist.records.format.image_bytes import Image

    return Image.open(io.BytesIO(data))


def _dtype(feature: Any) -> str | None:
    """Returns the dtype of numbers, those of a list or an array too; None of anything else."""
    while feature is not None and type(feature).__name__ in ("Sequence", "LargeList", "List"):
        feature = feature.feature
    if isinstance(feature, list) and feature:
        return _dtype(feature[0])
    dtype = getattr(feature, "dtype", None)
    is_number = isinstance(dtype, str) and dtype.rstrip("0123456789") in _NUMBERS
    return dtype if is_number else None


def open_builder(builder: Any, asked: Asked) -> Stream:
    """Returns the records of all splits of a builder whose data is there.

    What the dataset calls supervised is its input and its label, unless ``asked`` says otherwise.
    Images are the bytes of their files, and a ClassLabel keeps the names of its classes. Features
    within others are called by their path, "objects/bbox".

    Raises:
        DataError: data that is not prepared, or features of which only the user can say what they
            are.
    """
    splits = {name: split.num_examples for name, split in builder.info.splits.items()}
    if not splits:
        raise DataError(
            "a builder of TensorFlow Datasets must have its data",
            received=f"no split of '{builder.info.name}'",
            mend="Call builder.download_and_prepare() first",
        )
    names = [split_of_word(name) or name for name in splits]
    if len(set(names)) < len(names):
        raise DataError(
            "each split must be one of the builder's",
            received=", ".join(splits),
            mend="Write each by itself: builder.as_dataset(split=...)",
        )
    features = dict(_flat("", builder.info.features))
    if not asked.names_columns:
        asked = replace(asked, **_supervised(builder.info.supervised_keys, features))
    structure = Structure.of(dict.fromkeys(features), asked, builder.info.name)
    return structure.stream(
        "tfds",
        ((name, _of_split(builder, own)) for name, own in zip(names, splits, strict=True)),
        classes={
            name: tuple(features[name].names)
            for name in structure.labels
            if type(features[name]).__name__ == "ClassLabel" and features[name].names
        },
        total=sum(splits.values()),
        splits=tuple(names),
    )


def _supervised(keys: Any, features: Mapping[str, Any]) -> dict[str, str]:
    """Returns the roles that a dataset gives to its features itself; none where it names parts."""
    if not isinstance(keys, tuple) or not all(key in features for key in keys):
        return {}
    return dict(zip(("inputs", "label", "weight"), keys, strict=False))


def _of_split(builder: Any, split: str) -> Iterator[dict[str, Any]]:
    from tfdist.records.writing.streams.datasets import as_numpy

    decoders = _decoders(builder.info.features)
    dataset = builder.as_dataset(split=split, shuffle_files=False, decoders=decoders)
    for element in as_numpy(dataset):
        yield dict(_flat("", element))


def _decoders(features: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what keeps the files of images as they are."""
    package = sys.modules.get("tensorflow_datasets")
    images = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    if package is None or not images:
        return None
    return {name: package.decode.SkipDecoding() for name in images}


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dicts, and of the features that describe them."""
    inner = value if hasattr(value, "items") else getattr(value, "feature", None)
    if not hasattr(inner, "items"):
        yield path, value
        return
    for name, item in inner.items():
        yield from _flat(f"{path}/{name}" if path else name, item)
