"""Builders of TensorFlow Datasets, told by what they have: the package need not be imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tfdist.errors import DataError
from tfdist.records.format.splits import split_of_word
from tfdist.records.writing.roles import Asked
from tfdist.records.writing.streams.stream import Stream, Structure


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
        ((name, _records(builder, own)) for name, own in zip(names, splits, strict=True)),
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


def _records(builder: Any, split: str) -> Iterator[dict[str, Any]]:
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
