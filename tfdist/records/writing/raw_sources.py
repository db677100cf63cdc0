"""From what a user has (a folder, a file, arrays, a dataset) to columns of records."""

from __future__ import annotations

import io
import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError, OptionError
from tfdist.records.clients.dealing import take_column
from tfdist.records.format.columns import Columns, check_lengths, from_arrays
from tfdist.records.writing.roles import WEIGHT, Asked, Roles, assign

DIGITS = "digits"
_KINDS = f"a folder of class folders with images, a .csv file, a .npz file, or '{DIGITS}'"
_LIKE_AN_INPUT = re.compile(r"(x|inputs?|features?)(\d|[ _.-]|$)", re.IGNORECASE)


def read_raw(source: Any, asked: Asked | None = None, *, batched: bool | None = None) -> Columns:
    """Returns the records of a source.

    Args:
        source: a folder of class folders with images; a .csv or .npz file; "digits"; arrays
            ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, where ``x`` and ``y`` may be dicts of
            arrays; or a finite tf.data.Dataset of the same structures, or of batches of them, which
            is held in memory while it is written.
        asked: what the columns of a .csv, or the arrays of a .npz, are; and which one names the
            client of each record: a column of a .csv, one of several inputs, or the label. A label
            stays one; anything else is no input any more.
        batched: whether the elements of a dataset are batches; None finds out.

    Raises:
        DataError: the source is none of these, or its records cannot be written as they are.
        OptionError: something is asked that this source does not have.
    """
    asked = Asked() if asked is None else asked
    client = asked.client
    is_table = isinstance(source, (str, Path)) and Path(source).suffix.lower() in (".csv", ".npz")
    if asked.names_columns and not is_table:
        raise DataError(
            "the options label, inputs and drop must go with a .csv or .npz file",
            received=f"one of them with {source!r:.60}",
            mend="Leave it out",
        )
    if batched is not None and not _is_dataset(source):
        raise OptionError(
            "batched must be said of a tf.data.Dataset alone",
            received=f"batched={batched} beside a {type(source).__name__}",
            mend="Leave it out",
        )
    if isinstance(source, (str, Path)):
        columns = _open_named(source, asked)
    elif _is_dataset(source):
        columns = _from_dataset(source, client, batched)
    else:
        columns = _from_structure("arrays", source, client)
    if client is not None and columns.owners is None:
        return columns.owned_by_class(client)
    return columns


def _open_named(source: str | Path, asked: Asked) -> Columns:
    if source == DIGITS:
        return _from_digits()
    path = Path(source)
    if path.is_dir():
        from tfdist.records.writing.image_folders import from_class_folders

        return from_class_folders(path)
    if not path.is_file():
        raise DataError(
            f"the source must be {_KINDS}", received=f"'{source}', which does not exist"
        )
    if path.suffix.lower() == ".csv":
        from tfdist.records.writing.csv_files import from_csv

        return from_csv(path, asked)
    if path.suffix.lower() == ".npz":
        return _from_npz(path, asked)
    raise DataError(f"the source must be {_KINDS}", received=f"'{source}'")


def digits_npz() -> bytes:
    """Returns the .npz file of "digits": uint8 image [1797, 8, 8, 1] in 0..16, uint8 label [1797].

    It is the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak,
    UCI Machine Learning Repository, doi:10.24432/C50P49, under CC BY 4.0: the records that
    scikit-learn calls digits, in the same order.
    """
    return (resources.files("tfdist.records") / "digits.npz").read_bytes()


def _from_digits() -> Columns:
    with np.load(io.BytesIO(digits_npz()), allow_pickle=False) as arrays:
        images, labels = arrays["image"], arrays["label"]
    names = [str(name) for name in range(10)]
    return from_arrays(DIGITS, {"image": images}, {"label": labels}, classes={"label": names})


def _from_npz(path: Path, asked: Asked) -> Columns:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(
            f"{path} must be an archive of numeric arrays, as numpy.savez writes it",
            received=f"an error: {error}",
        ) from None
    roles = assign(str(path), "array", list(arrays), asked, doubtful=_like_labels(arrays))
    columns = _owned(
        "npz",
        {name: arrays[name] for name in (*roles.inputs, *_client_input(roles))},
        {name: arrays[name] for name in roles.labels},
        {} if roles.weight is None else {roles.weight: arrays[roles.weight]},
        asked.client,
    )
    return replace(columns, roles=roles.listed(list(arrays)))


def _client_input(roles: Roles) -> tuple[str, ...]:
    is_input = roles.client is not None and roles.client not in roles.labels
    return (roles.client,) if is_input else ()


def _like_labels(arrays: Mapping[str, np.ndarray]) -> set[str]:
    """Returns the arrays of one number a record that are not called as inputs are."""
    return {
        name for name, array in arrays.items() if array.ndim == 1 and not _LIKE_AN_INPUT.match(name)
    }


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
        {} if weight is None else {WEIGHT: weight},
        client,
    )


def _named(value: Any, name: str) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {name: value}


def _is_dataset(source: Any) -> bool:
    # A dataset can only come from a program that has imported TensorFlow already.
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(source, tf.data.Dataset)


def _from_dataset(dataset: Any, client: str | None, batched: bool | None) -> Columns:
    import tensorflow as tf

    from tfdist.records.reading.batched import single_records

    records = single_records(dataset, batched)
    if records.note is not None:
        print(f"tfdist: {records.note}", flush=True)
    dataset = records.dataset
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
