"""From what a user has (a folder, a file, arrays, a dataset) to columns of records."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.columns import Columns, check_lengths, from_arrays
from tfdist.records.partition import take_column

DIGITS = "digits"
_KINDS = f"a folder of class folders with images, a .csv file, a .npz file, or '{DIGITS}'"
_LABEL_ARRAYS = ("y", "label", "labels")
_WEIGHT_ARRAY = "sample_weight"


def open_source(source: Any, label: str | None = None, client: str | None = None) -> Columns:
    """Returns the records of a source.

    Args:
        source: a folder of class folders with images; a .csv or .npz file; "digits"; arrays
            ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, where ``x`` and ``y`` may be dicts of
            arrays; or an unbatched, finite tf.data.Dataset of the same structures, which is held in
            memory while it is written.
        label: the label's column of a .csv, or its array in a .npz.
        client: the column that names the client of each record: a column of a .csv, one of several
            inputs, or the label. A label stays one; anything else is no input any more.

    Raises:
        DataError: the source is none of these, or its records cannot be written as they are.
    """
    is_table = isinstance(source, (str, Path)) and Path(source).suffix.lower() in (".csv", ".npz")
    if label is not None and not is_table:
        raise DataError(
            "the option label must go with a .csv or .npz file",
            received=f"'{label}' with another source",
            mend="Leave it out",
        )
    if isinstance(source, (str, Path)):
        columns = _open_named(source, label, client)
    elif _is_dataset(source):
        columns = _from_dataset(source, client)
    else:
        columns = _from_structure("arrays", source, client)
    if client is not None and columns.owners is None:
        return columns.owned_by_class(client)
    return columns


def _open_named(source: str | Path, label: str | None, client: str | None) -> Columns:
    if source == DIGITS:
        return _from_digits()
    path = Path(source)
    if path.is_dir():
        from tfdist.records.folders import from_class_folders

        return from_class_folders(path)
    if not path.is_file():
        raise DataError(
            f"the source must be {_KINDS}", received=f"'{source}', which does not exist"
        )
    if path.suffix.lower() == ".csv":
        from tfdist.records.tables import from_csv

        return from_csv(path, label, client)
    if path.suffix.lower() == ".npz":
        return _from_npz(path, label, client)
    raise DataError(f"the source must be {_KINDS}", received=f"'{source}'")


def _from_digits() -> Columns:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images.astype(np.uint8)[..., np.newaxis]
    names = [str(name) for name in digits.target_names]
    return from_arrays(
        DIGITS, {"image": images}, {"label": digits.target}, classes={"label": names}
    )


def _from_npz(path: Path, label: str | None, client: str | None) -> Columns:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(
            f"{path} must be an archive of numeric arrays, as numpy.savez writes it",
            received=f"an error: {error}",
        ) from None
    names = ", ".join(arrays) or "none"
    if label is None:
        label = next((name for name in _LABEL_ARRAYS if name in arrays), None)
    if label not in arrays:
        wanted = f"'{label}'" if label else f"called {', '.join(_LABEL_ARRAYS)}"
        raise DataError(
            f"{path} must have a label array {wanted}",
            received=f"arrays {names}",
            mend="Name the label's array: --label NAME",
        )
    labels = {label: arrays.pop(label)}
    weights = {name: arrays.pop(name) for name in (_WEIGHT_ARRAY,) if name in arrays}
    if not arrays:
        raise DataError(
            f"{path} must have an input array beside the label", received=f"arrays {names}"
        )
    return _owned("npz", arrays, labels, weights, client)


def _owned(
    kind: str,
    inputs: Mapping[str, Any],
    labels: Mapping[str, Any],
    weights: Mapping[str, Any],
    client: str | None,
) -> Columns:
    owners = None
    if client is not None:
        owners, inputs = take_column(client, inputs, labels)
    columns = from_arrays(kind, inputs, labels, weights)
    if owners is not None:
        check_lengths({client: len(owners), "records": columns.num_records})
    return replace(columns, owners=owners)


def _from_structure(kind: str, source: Any, client: str | None) -> Columns:
    parts = source if isinstance(source, tuple) else (source,)
    if not 1 <= len(parts) <= 3:
        raise DataError(
            "arrays must be x, (x, y) or (x, y, sample_weight)", received=f"a tuple of {len(parts)}"
        )
    x, y, weight = (*parts, None, None)[:3]
    return _owned(
        kind,
        _named(x, "x"),
        {} if y is None else _named(y, "label"),
        {} if weight is None else {_WEIGHT_ARRAY: weight},
        client,
    )


def _named(value: Any, name: str) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {name: value}


def _is_dataset(source: Any) -> bool:
    # A dataset can only come from a program that has imported TensorFlow already.
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(source, tf.data.Dataset)


def _from_dataset(dataset: Any, client: str | None) -> Columns:
    import tensorflow as tf

    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise DataError("a dataset to write must be finite", received="an infinite dataset")
    try:
        batches = list(dataset.batch(1024).as_numpy_iterator())
    except tf.errors.InvalidArgumentError as error:
        raise DataError(
            "all records of a dataset must have the same shape",
            received="an error: " + error.message.split("\n")[0],
        ) from None
    if not batches:
        raise DataError("a source must have at least one record", received="an empty dataset")
    whole = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)
    return _from_structure("dataset", whole, client)
