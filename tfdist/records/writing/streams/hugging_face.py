"""Datasets of Hugging Face's ``datasets``, told by what they have: it need not be imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
