"""Size and quality of a model before and after it was made smaller."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdist.export.converter import Conversion, convert
from tfdist.export.interpreter import TfliteModel
from tfdist.export.models import PlainModel, open_model
from tfdist.export.parity import judging_metric, keras_outputs, metrics
from tfdist.export.reports import as_text, table_of
from tfdist.export.samples import Rows, Samples, fitted, open_samples

if TYPE_CHECKING:
    from rich.table import Table

_SAMPLES, _PARITY_SAMPLES = 200, 1000


@dataclass(frozen=True)
class Measured:
    """A model as a file.

    Attributes:
        weights: number of trainable and other weights.
        zeros: share of them that are 0.
        bytes: of the TFLite file.
        gzip_bytes: of the file compressed, as an app is when it is downloaded.
        metric, value: on held-out records, through the file: an accuracy or the loss.
    """

    weights: int
    zeros: float
    bytes: int
    gzip_bytes: int
    metric: str
    value: float


@dataclass(frozen=True)
class Comparison:
    """What making a model smaller changed; ``print`` shows it as a table.

    Attributes:
        what: was done, for people.
        quantization: of the files that were measured.
        place: the records that both were measured on.
        before, after: the models.
        note: how to read the sizes.
    """

    what: str
    quantization: str
    place: str
    before: Measured
    after: Measured
    note: str = ""

    def tables(self) -> Iterator[Table]:
        kind = "unquantized" if self.quantization == "none" else self.quantization
        title = f"{self.what}; {kind} files, on {self.place}"
        right = ("weights", "zeros", "bytes", "gzip bytes", self.before.metric)
        table = table_of(title, ("",), right)
        for name, measured in (("before", self.before), ("after", self.after)):
            table.add_row(
                name,
                f"{measured.weights:,}",
                f"{measured.zeros:.1%}",
                f"{measured.bytes:,}",
                f"{measured.gzip_bytes:,}",
                f"{measured.value:.4f}",
            )
        yield table

    def __str__(self) -> str:
        return as_text(self.tables(), [f"note: {self.note}"] if self.note else [])


class Scale:
    """Measures models on the same records."""

    def __init__(self, model: tf.keras.Model, data: Any, quantization: str = "none"):
        self._quantization = quantization
        self._samples: Samples = open_samples(
            data,
            open_model(model).inputs,
            samples=_SAMPLES,
            parity_samples=_PARITY_SAMPLES,
        )

    def measure(self, model: tf.keras.Model) -> Measured:
        plain = open_model(model)
        calibration = _for_model(self._samples.calibration, plain)
        how = Conversion(self._quantization, calibration, input_type="float32")
        content = convert(plain, how)
        rows = _for_model(self._samples.held_out, plain)
        outputs = (
            keras_outputs(plain, rows)
            if self._quantization == "none"
            else TfliteModel(content).predict(rows.x)
        )
        values = metrics(plain, rows, outputs)
        metric = judging_metric(values)
        arrays = model.get_weights()
        count = sum(array.size for array in arrays)
        return Measured(
            weights=count,
            zeros=1 - sum(np.count_nonzero(array) for array in arrays) / max(count, 1),
            bytes=len(content),
            gzip_bytes=len(gzip.compress(content)),
            metric=metric or "no labels",
            value=values[metric] if metric else float("nan"),
        )

    def compare(
        self, what: str, before: tf.keras.Model, after: tf.keras.Model, note: str = ""
    ) -> Comparison:
        return Comparison(
            what=what,
            quantization=self._quantization,
            place=f"{len(self._samples.held_out)} of {self._samples.place}",
            before=self.measure(before),
            after=self.measure(after),
            note=note,
        )


def _for_model(rows: Rows, model: PlainModel) -> Rows:
    """Another model calls its inputs by other names."""
    return replace(rows, x=fitted(list(rows.x.values()), model.inputs))
