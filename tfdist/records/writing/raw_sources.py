"""From what a user has (a folder, a file, arrays, a dataset) to columns of records."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.columns import Columns, from_arrays
from tfdist.records.sources.dataframes import plain
from tfdist.records.sources.elements import check_parts
from tfdist.records.sources.recognise import recognise, refuse_batched
from tfdist.records.writing.array_files import (
    from_npy,
    from_npy_folder,
    from_npz,
    npy_files,
    owned,
)
from tfdist.records.writing.images.options import ImageOptions
from tfdist.records.writing.roles import WEIGHT, Asked
from tfdist.records.writing.tables.files import NAMES as TABLES
from tfdist.records.writing.tables.files import SPREADSHEETS, kind_of_file, read_table, room_for
from tfdist.records.writing.tables.json_lines import AS_JSON_LINES
from tfdist.records.writing.tables.typed import from_dataframe
from tfdist.records.writing.text_folders import from_text_folders, holds_texts

DIGITS = "digits"
_KINDS = (
    f"a folder of class folders with images or texts, {TABLES}, a .npz or .npy file, a folder of "
    f".npy files, a .tar file, a folder of shards, or '{DIGITS}'"
)


def read_raw(
    source: Any,
    asked: Asked | None = None,
    *,
    batched: bool | None = None,
    images: ImageOptions | None = None,
) -> Columns:
    """Returns the records of a source.

    Args:
        source: a folder of images, or of class folders with texts; a table, in a file (.csv, .tsv,
            .jsonl, .parquet, .arrow, .feather) or a DataFrame; a .npz file; "digits"; arrays
            ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, where ``x`` and ``y`` may be dicts of
            arrays.
        asked: what the columns of a table, or the arrays of a .npz, are; and which one names the
            client of each record: a column of a table, one of several inputs, or the label. A label
            stays one; anything else is no input any more.
        batched: must be None: said of streams alone.
        images: of a folder of images, what else is said of it.

    Raises:
        DataError: the source is none of these, or its records cannot be written as they are.
        OptionError: something is asked that this source does not have.
    """
    asked = Asked() if asked is None else asked
    images = ImageOptions() if images is None else images
    client = asked.client
    _check_asked(source, asked, images)
    refuse_batched(batched, source)
    if isinstance(source, (str, Path)):
        columns = _open_named(source, asked, images)
    elif recognise(source).kind == "table":
        from tfdist.records.writing.tables.records import columns_of_table

        # Whoever has a DataFrame can name its label; that of a file is the last by custom.
        columns = columns_of_table(from_dataframe(source), asked, last_is_label=False)
    elif recognise(source).kind == "unknown":
        raise DataError(
            "the source must be files, arrays or tables, a dataset, or a function that yields "
            "records or batches",
            received=f"a {type(source).__name__}",
            mend="Give the records themselves, or the path of their files",
        )
    else:
        columns = _from_structure(source, client)
    return columns.owned_by(client)


def _check_asked(source: Any, asked: Asked, images: ImageOptions) -> None:
    """Raises an error for what is asked that this source has not."""
    path = Path(source) if isinstance(source, (str, Path)) and source != DIGITS else None
    is_folder, suffix = path is not None and path.is_dir(), "" if path is None else path.suffix
    of_file = None if path is None else kind_of_file(path)
    is_array = suffix.lower() in (".npz", ".npy")
    if path is not None and of_file is None and not is_array and not is_folder:
        return  # Refused for what it is when it is opened, whatever is asked of it.
    is_table = of_file is not None or recognise(source).kind == "table"
    # Whether it holds arrays that have names.
    is_archive = suffix.lower() == ".npz" or (is_folder and bool(npy_files(path)))
    if not is_folder:
        (replace(images, skip_bad=False) if is_table else images).check_unused(source)
    if asked.names_columns and not (is_table or is_archive or images.labels is not None):
        raise DataError(
            "the options label, inputs, drop and weight must go with a table or a .npz file",
            received=f"one of them with {source!r:.60}",
            mend="Leave it out",
        )
    if not is_table:
        beside = images.labels is not None
        check_no_table(source, replace(asked, text=None, categories=None) if beside else asked)


def check_no_table(source: Any, asked: Asked) -> None:
    """Raises DataError for what is asked that only a table has."""
    if asked.is_of_a_table:
        raise DataError(
            "the options text, categories and missing must go with a table",
            received=f"one of them with {source!r:.60}",
            mend="Leave it out",
        )


def _open_named(source: str | Path, asked: Asked, images: ImageOptions) -> Columns:
    if source == DIGITS:
        return _from_digits()
    path = Path(source)
    suffix = path.suffix.lower()
    if path.is_dir():
        if npy_files(path):
            return from_npy_folder(path, asked)
        if images.labels is images.masks is None and holds_texts(path):
            replace(images, skip_bad=False).check_unused(source)
            return from_text_folders(path, skip_bad=asked.skip_bad)
        from tfdist.records.writing.images.folders import from_image_folder

        return from_image_folder(path, asked, images)
    if not path.is_file():
        raise DataError(
            f"the source must be {_KINDS}",
            received=f"'{source}', which does not exist",
            mend="Check its spelling, or write the whole path",
        )
    if kind_of_file(path) is not None:
        from tfdist.records.writing.tables.records import columns_of_table

        with room_for(path):
            return columns_of_table(read_table(path, in_file=True), asked, last_is_label=True)
    if suffix == ".npz":
        return from_npz(path, asked)
    if suffix == ".npy":
        return from_npy(path)
    mend = (
        "Save it as CSV" if suffix in SPREADSHEETS else "Convert it to one of these, such as .csv"
    )
    if suffix == ".json":
        mend = AS_JSON_LINES
    raise DataError(f"the source must be {_KINDS}", received=f"'{source}'", mend=mend)


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


def _from_structure(source: Any, client: str | None) -> Columns:
    parts = source if isinstance(source, tuple) else (source,)
    check_parts("arrays", parts)
    # Those of pandas, too.
    x, y, weight = (plain(part) for part in (*parts, None, None)[:3])
    labels = {} if y is None else _named(y, "label")
    weights = {} if weight is None else {WEIGHT: weight}
    return owned("arrays", _named(x, "x"), labels, weights, client)


def _named(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    for key, values in value.items():
        if isinstance(values, tuple) and any(hasattr(part, "__len__") for part in values):
            raise DataError(
                f"'{key}' of a dict of arrays must be one array",
                received=f"a tuple of {len(values)}",
                mend="Write the arrays of one split, and others elsewhere; or all in a .npz file, "
                "as x_train, y_train, x_test and y_test, which are then the splits",
            )
    return value
