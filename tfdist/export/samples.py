"""Real records for an export: some to learn ranges from, others to judge the file on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records.format.manifest import splits_of
from tfdist.records.reading.reader import Records, open_records
from tfdist.training.engine.options import check_count

# Splits by what they are best for.
_TO_JUDGE = ("validation", "test", "train")
_TO_CALIBRATE = ("train", "validation", "test")
_BATCH_ROWS = 64


@dataclass(frozen=True)
class Rows:
    """Records in memory.

    Attributes:
        x: name -> array [rows, ...], in the dtype of the records.
        y: array or dict of arrays [rows, ...]; None without labels.
        weight: array [rows]; None without sample weights.
    """

    x: dict[str, np.ndarray]
    y: Any = None
    weight: np.ndarray | None = None

    def __len__(self) -> int:
        return len(next(iter(self.x.values())))


@dataclass(frozen=True)
class Samples:
    """What an export reads of the user's data.

    Attributes:
        calibration: at most ``samples`` records.
        held_out: the records to judge on.
        place: where those to judge on come from, for people.
    """

    calibration: Rows
    held_out: Rows
    place: str


def open_samples(
    data: Any,
    inputs: dict[str, tf.TensorSpec],
    *,
    samples: int,
    parity_samples: int,
) -> Samples:
    """Reads records for the model's inputs.

    Args:
        data: a folder of shards, whose split train is calibrated on and validation (or test)
            judged on; "DIR/SPLIT", arrays or an unbatched dataset serve for both.
        inputs: of the model, name -> spec.
        samples: records to calibrate on, at most.
        parity_samples: records to judge on, at most.

    Raises:
        DataError: no data there, none left, or not of the model's shapes. OptionError: fewer than
            one record wanted.
    """
    check_count("samples", samples)
    check_count("parity_samples", parity_samples)
    to_calibrate, to_judge, place = _choose(data)
    calibration = _rows(to_calibrate, inputs, samples, seed=0)
    return Samples(calibration, _rows(to_judge, inputs, parity_samples, seed=1), place)


def _choose(data: Any) -> tuple[Records, Records, str]:
    """Returns the records to calibrate on, those to judge on, and what the latter are called."""
    if (found := splits_of(data)) is not None:
        folder, splits = found
        first = next(iter(splits))
        calibrate = next((name for name in _TO_CALIBRATE if name in splits), first)
        judge = next((name for name in _TO_JUDGE if name in splits), first)
        both = open_records(folder / calibrate), open_records(folder / judge)
        return *both, f"{data}/{judge}"
    records = open_records(data)
    return records, records, str(data) if isinstance(data, (str, Path)) else "the given records"


def _rows(records: Records, inputs: dict[str, tf.TensorSpec], wanted: int, seed: int) -> Rows:
    if records.num_records < 1:
        raise DataError(
            "data must have at least one record",
            received="none",
            mend="Give a split or arrays that have records",
        )
    taken = min(wanted, records.num_records)
    batches = records.batches(
        0, records.num_records, min(_BATCH_ROWS, taken), shuffle=True, seed=seed, epoch=0
    )
    kept, count = [], 0
    for batch in batches:
        kept.append(tf.nest.map_structure(lambda tensor: tensor.numpy(), batch))
        count += len(tf.nest.flatten(batch)[0])
        if count >= taken:
            break
    x, y, weight = tf.keras.utils.unpack_x_y_sample_weight(
        tf.nest.map_structure(lambda *parts: np.concatenate(parts)[:taken], *kept)
    )
    return Rows(fitted(x, inputs), y, weight)


def fitted(x: Any, inputs: dict[str, tf.TensorSpec]) -> dict[str, np.ndarray]:
    """Returns the arrays by the names of the model's inputs.

    Raises:
        DataError: other names or shapes than the model's.
    """
    if not isinstance(x, dict):
        parts = list(x) if isinstance(x, (list, tuple)) else [x]
        x = dict(zip(inputs, parts, strict=False)) if len(parts) == len(inputs) else {}
    elif len(x) == len(inputs) == 1:
        x = dict(zip(inputs, x.values(), strict=True))
    if set(x) != set(inputs):
        raise DataError(
            f"records must have the inputs {', '.join(inputs)} of the model",
            received=", ".join(x) or "another number of inputs",
            mend="Name the model's keras.Input layers as the features are named",
        )
    for name, spec in inputs.items():
        array = x[name]
        if not spec.shape[1:].is_compatible_with(array.shape[1:]):
            raise DataError(
                f"records for input '{name}' of the model must have shape {list(spec.shape[1:])}",
                received=f"shape {list(array.shape[1:])}",
                mend="Give the data that the model was trained on",
            )
    return {name: x[name] for name in inputs}
