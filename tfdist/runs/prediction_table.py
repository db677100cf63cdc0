"""Predictions as a table: a row for each record, with what it is called and what was said of it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.compat import is_keras
from tfdist.errors import ModelError
from tfdist.records.format.schema import Schema
from tfdist.records.replacing import replacing

#: What the only output of a model is called.
ALONE = "predictions"
_INFINITE = (float("inf"), float("-inf"))
# Probabilities of a record add up to 1 within this, of float16 too.
_ROUNDED = 1e-2
_ROWS_BETWEEN = 10_000


def check_dimensions(dimensions: Mapping[str, int | None]) -> None:
    """Raises ModelError for an output of more than a row of numbers a record.

    Args:
        dimensions: of each output, that of the records among them; None: unknown.
    """
    larger = [name for name, known in dimensions.items() if (known or 0) > 2]
    if larger:
        raise ModelError(
            "an output in a table must be a number, or a row of them, for each record",
            received=f"output '{larger[0]}', of {dimensions[larger[0]]} dimensions",
            mend="Write a file .npz, which holds outputs of any shape",
        )


def classes_of(schemas: Sequence[Schema], outputs: Sequence[str]) -> dict[str, Sequence[str]]:
    """Returns the names of classes by output; none where they have no names.

    Args:
        schemas: of the data, and of what the model was trained on; the first with labels tells.
        outputs: the names of the outputs. The only one has the only label.
    """
    for schema in schemas:
        labels = {f.name: f.classes or () for f in schema.of_role("label") if f.is_class_id}
        if len(labels) == len(outputs) == 1:
            return {outputs[0]: next(iter(labels.values()))}
        if labels:
            return {name: names for name, names in labels.items() if name in outputs}
    return {}


def columns_of(
    keys: Mapping[str, Any],
    outputs: Mapping[str, np.ndarray],
    losses: Mapping[str, Any],
    classes: Mapping[str, Sequence[str]],
) -> dict[str, np.ndarray]:
    """Returns the columns of the table, each [records].

    What a crossentropy was taken of, or what are probabilities of known classes, becomes the class
    and its probability; any other output its values. Of several outputs each column begins with
    the name of its own.

    Args:
        keys: the columns that say which record it is.
        outputs: by name, [records, ...].
        losses: by name, what Keras was given.
        classes: see ``classes_of``.

    Raises:
        ModelError: an output of more than a row a record, or two columns of one name.
    """
    check_dimensions({name: rows.ndim for name, rows in outputs.items()})
    columns = {name: np.asarray(values) for name, values in keys.items()}
    for name, rows in outputs.items():
        of_output = _parts(rows.reshape(len(rows), -1), losses.get(name), classes.get(name))
        for part, values in of_output:
            own = part if name == ALONE else f"{name}_{part}".replace(f"{name}_value", name)
            if own in columns:
                raise ModelError(
                    "each column of predictions must have a name of its own",
                    received=f"'{own}' twice, once of output '{name}'",
                    mend="Give the output another name, or write a file .npz",
                )
            columns[own] = values
    return columns


def _parts(
    rows: np.ndarray, loss: Any, classes: Sequence[str] | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the columns of an output [records, values]."""
    import tensorflow as tf

    kind, width = _kind_of(loss), rows.shape[1]
    is_binary, is_categorical = "binary" in kind, "categorical" in kind
    # The losses of Keras 2 have no attribute that says so.
    if kind and isinstance(loss, tf.keras.losses.Loss) and loss.get_config().get("from_logits"):
        rows = (tf.nn.sigmoid if is_binary else tf.nn.softmax)(rows).numpy()
    if is_binary and width == 1:
        rows = np.concatenate([1 - rows, rows], axis=1)
    elif not is_categorical and (is_binary or classes is None or not _are_probabilities(rows)):
        what = "probability" if is_binary else "value"
        numbers = [""] if width == 1 else [f"_{number}" for number in range(width)]
        yield from ((f"{what}{n}", rows[:, place]) for place, n in enumerate(numbers))
        return
    best = rows.argmax(axis=1)
    is_named = classes is not None and len(classes) == rows.shape[1]
    yield "class", np.array(classes, object)[best] if is_named else best
    yield "probability", rows.max(axis=1)


def _kind_of(loss: Any) -> str:
    """Returns "binarycrossentropy" or the like, "" of what is no crossentropy of Keras."""
    import tensorflow as tf

    loss = tf.keras.losses.get(loss) if isinstance(loss, str) else loss
    named = loss if hasattr(loss, "__name__") else type(loss)
    name = named.__name__.replace("_", "").lower()
    # One of a user's own may be taken of anything, whatever it is called.
    return name if name.endswith("crossentropy") and is_keras(named.__module__) else ""


def _are_probabilities(rows: np.ndarray) -> bool:
    if rows.dtype.kind != "f" or rows.shape[1] < 2:
        return False
    return bool((rows >= 0).all() and np.allclose(rows.sum(axis=1), 1, atol=_ROUNDED))


def write_table(
    path: Path, columns: Mapping[str, np.ndarray], tell: Callable[[], None] = lambda: None
) -> None:
    """Writes a whole file only: CSV, JSON lines or Parquet, as its suffix says.

    Args:
        tell: called now and then while it is written.

    Raises:
        WriteError: the disk is full, or the folder cannot be written.
    """
    with replacing(path) as temporary:
        if path.suffix == ".parquet":
            import pyarrow
            from pyarrow import parquet

            table = {}
            for name, values in columns.items():
                table[name] = pyarrow.array(values.tolist() if values.dtype == object else values)
                tell()
            parquet.write_table(pyarrow.table(table), temporary)
            return
        rows = _plain_rows(columns, tell)
        with temporary.open("w", newline="", encoding="utf-8") as file:
            if path.suffix == ".csv":
                writer = csv.writer(file)
                writer.writerow(columns)
                writer.writerows(rows)
                return
            for row in rows:
                # JSON knows no NaN.
                values = (None if value != value or value in _INFINITE else value for value in row)
                line = dict(zip(columns, values, strict=True))
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


def _plain_rows(columns: Mapping[str, np.ndarray], tell: Callable[[], None]) -> Iterator[Any]:
    """Yields rows of plain values: as lists, all of them would be several times as large."""
    for start in range(0, max(map(len, columns.values())), _ROWS_BETWEEN):
        tell()
        some = (values[start : start + _ROWS_BETWEEN] for values in columns.values())
        yield from zip(*map(_as_text_needs, some), strict=True)


def _as_text_needs(values: np.ndarray) -> list[Any]:
    """Returns plain values, numbers with the digits that their own type has."""
    if values.dtype.kind == "f":
        return [float(str(value)) for value in values]
    return values.tolist()
