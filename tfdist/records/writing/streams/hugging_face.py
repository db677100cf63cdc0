"""Datasets of Hugging Face's ``datasets``, told by what they have: it need not be imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.records.writing.roles import Asked
from tfdist.records.writing.streams.stream import Stream, Structure, image_like

# Names of splits there, and here.
_SPLITS = {"val": "validation", "valid": "validation"}
_NUMBERS = ("int", "uint", "float", "bool")


def is_dataset(source: Any) -> bool:
    """Whether it is a Dataset or IterableDataset, or a dict of them by split."""
    if isinstance(source, Mapping) and source:
        return all(is_dataset(each) for each in source.values())
    return (
        hasattr(source, "features")
        and hasattr(source, "cast_column")
        and hasattr(source, "__iter__")
    )


def open_dataset(source: Any, asked: Asked) -> Stream:
    """Returns the records of a dataset, or those of each split of several.

    Images are the bytes of their files, where these are JPEG or PNG; a ClassLabel keeps the names
    of its classes.

    Raises:
        DataError: columns of which only the user can say what they are.
    """
    parts = dict(source) if isinstance(source, Mapping) else {None: source}
    parts = {_SPLITS.get(name, name): _with_bytes(each) for name, each in parts.items()}
    first = next(iter(parts.values()))
    # Of a stream the columns may be known by its first record alone.
    features = first.features or dict.fromkeys(next(iter(first), {}))
    structure = Structure.of(dict.fromkeys(features), asked, "dataset")
    lengths = [len(each) if hasattr(each, "__len__") else None for each in parts.values()]
    return structure.stream(
        "huggingface",
        structure.chunks((split, _records(part, structure)) for split, part in parts.items()),
        classes={
            name: tuple(feature.names)
            for name, feature in features.items()
            if name in structure.labels and hasattr(feature, "names")
        },
        dtypes={name: dtype for name in features if (dtype := _dtype(features[name]))},
        total=None if None in lengths else sum(lengths),
        splits=tuple(parts) if isinstance(source, Mapping) else None,
    )


def _records(part: Any, structure: Structure) -> Iterator[Mapping[str, Any]]:
    """Yields the records of a split, with the bytes of the images that are wanted."""
    for record in part:
        wanted = [name for name in structure.names if name in record]
        yield {**record, **{name: _image_bytes(record[name]) for name in wanted}}


def _with_bytes(dataset: Any) -> Any:
    """Returns the dataset with the files of its images, which it would decode otherwise."""
    for name, feature in (dataset.features or {}).items():
        if type(feature).__name__ == "Image":
            dataset = dataset.cast_column(name, type(feature)(decode=False))
    return dataset


def _image_bytes(value: Any) -> Any:
    if not (isinstance(value, Mapping) and set(value) == {"bytes", "path"}):
        return value
    if value["bytes"] is None and value["path"] is not None:
        with open(value["path"], "rb") as file:
            data = file.read()
    else:
        data = value["bytes"]
    if data is None or image_like(data):
        return data
    import io

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
