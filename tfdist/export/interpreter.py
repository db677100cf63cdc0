"""Runs a TFLite file as a phone would: one record at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ExportError, in_one_line
from tfdist.export.quiet import quiet


def opened(content: bytes, **how: Any) -> tf.lite.Interpreter:
    """Returns TFLite's own interpreter of a file, whose tensors have their memory.

    Args:
        how: further arguments of ``tf.lite.Interpreter``.
    """
    with quiet():
        interpreter = tf.lite.Interpreter(model_content=content, **how)
        interpreter.allocate_tensors()
    return interpreter


class TfliteModel:
    """A file in the interpreter.

    Attributes:
        inputs, outputs: name -> what the file says of the tensor, "shape", "dtype" and
            "quantization" (scale, zero point) among it.
    """

    def __init__(self, content: bytes):
        try:
            self._run = opened(content, num_threads=1).get_signature_runner()
        except (RuntimeError, ValueError) as error:
            raise ExportError(
                "the interpreter must be able to run the file",
                received=f"an error: {str(error)[:300]}",
                mend="Export the model anew, or choose another quantization",
            ) from error
        self.inputs = self._run.get_input_details()
        self.outputs = self._run.get_output_details()

    def encoded(self, record: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns values as the file wants them, by the scale and zero point that are in it."""
        return {name: _encoded(value, self.inputs[name]) for name, value in record.items()}

    def invoke(self, record: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs the file on encoded values of shape [1, ...]; returns float outputs [1, ...]."""
        try:
            outputs = self._run(**record)
        except RuntimeError as error:
            raise ExportError(
                "the interpreter must be able to run the file",
                received=f"an error: {in_one_line(error)}",
                mend="Choose another quantization, or a layer that TFLite has for this one",
            ) from error
        return {name: _decoded(value, self.outputs[name]) for name, value in outputs.items()}

    def predict(
        self,
        x: dict[str, np.ndarray],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, np.ndarray]:
        """Returns the outputs [rows, ...] for the records ``x``, name -> array [rows, ...]."""
        rows = len(next(iter(x.values())))
        parts = []
        with quiet():
            for row in range(rows):
                record = {name: column[row : row + 1] for name, column in x.items()}
                parts.append(self.invoke(self.encoded(record)))
                progress(row + 1, rows)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _encoded(value: np.ndarray, details: dict[str, Any]) -> np.ndarray:
    scale, zero_point = details["quantization"]
    dtype = details["dtype"]
    if scale == 0:
        return value.astype(dtype)
    limits = np.iinfo(dtype)
    return np.clip(np.rint(value / scale) + zero_point, limits.min, limits.max).astype(dtype)


def _decoded(value: np.ndarray, details: dict[str, Any]) -> np.ndarray:
    scale, zero_point = details["quantization"]
    if scale == 0:
        return value
    return ((value.astype(np.float32) - zero_point) * scale).astype(np.float32)
