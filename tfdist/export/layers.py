"""Which layers lose most when a model is quantized to int8: TensorFlow's quantization debugger."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from tfdist.errors import ExportError
from tfdist.export.converter import Conversion, input_specs, make_converter, representative
from tfdist.export.flatbuffer import computed_tensors, input_order, tensor_names
from tfdist.export.interpreter import opened
from tfdist.export.models import PlainModel
from tfdist.export.quiet import quiet
from tfdist.export.samples import Rows
from tfdist.keras.graph import layer_of_scope, output_names
from tfdist.keras.layers import layers_in

# The debugger runs each operator twice, in slow reference kernels.
_RECORDS = 20
# The root mean square error of rounding alone, in steps of the scale.
ROUNDING = 1 / np.sqrt(12)

_OUTPUT = "StatefulPartitionedCall"
# Operators of TFLite, and how Keras 2 and Keras 3 call the operation that they are made of.
_OPERATIONS = {
    "CONV_2D": ("Conv2D", "convolution"),
    "DEPTHWISE_CONV_2D": "depthwise",
    "FULLY_CONNECTED": "MatMul",
}


@dataclass(frozen=True)
class LayerError:
    """What one operator of the file loses against float32, given the same inputs.

    Attributes:
        layer: the Keras layer, or the tensor's name where there is none.
        operator: of TFLite, such as "CONV_2D".
        relative_error: root mean square error divided by the typical size of the output, which is
            its median distance from the median: a few large values do not hide that 256 steps
            leave nothing of all others.
        rmse_in_steps: root mean square error divided by the scale of the output: 0.29 is rounding
            alone, much more means saturation.
        largest_error: in the units of the output.
    """

    layer: str
    operator: str
    relative_error: float
    rmse_in_steps: float
    largest_error: float


def layer_errors(
    model: PlainModel,
    how: Conversion,
    content: bytes,
    float_content: bytes,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[LayerError, ...]:
    """Returns the operators of the int8 file ``content``, the worst first.

    Args:
        float_content: the float32 file of the same model.
        progress: called with records done, of all.

    Raises:
        ExportError: the debugger cannot run the model.
    """
    assert how.quantization == "int8", how.quantization
    assert how.calibration is not None
    rows = how.calibration
    few = Rows({name: column[:_RECORDS] for name, column in rows.x.items()})
    # Of float inputs, as the debugger compares with a float model.
    plain = replace(how, input_type="float32", output_type="float32")
    specs = input_specs(model, plain)
    order = input_order(content)
    few = replace(plain, calibration=few, progress=progress)
    with quiet():
        try:
            debugger = tf.lite.experimental.QuantizationDebugger(
                converter=make_converter(model, plain),
                debug_dataset=lambda: (
                    [row[name] for name in order] for row in representative(specs, few)
                ),
            )
            debugger.run()
        except Exception as error:
            raise ExportError(
                "the quantization debugger must be able to run the model",
                received=f"an error: {type(error).__name__}: {str(error)[:200]}",
                mend="Leave out the report of the layers",
            ) from error
    text = io.StringIO()
    debugger.layer_statistics_dump(text)
    text.seek(0)
    sizes = _typical_sizes(float_content, representative(specs, few))
    errors = [_error_of(row, sizes, model.keras) for row in csv.DictReader(text)]
    return tuple(sorted(errors, key=lambda error: -error.relative_error))


def _typical_sizes(content: bytes, records: Iterable[dict[str, np.ndarray]]) -> dict[str, float]:
    """Returns for each tensor of a float file the median distance of its values from the median."""
    interpreter = opened(content, experimental_preserve_all_tensors=True)
    inputs = dict(zip(input_order(content), interpreter.get_input_details(), strict=True))
    names = {
        number: name
        for number, name in tensor_names(content).items()
        if number in set(computed_tensors(content))
    }
    seen: dict[str, list[np.ndarray]] = {name: [] for name in names.values()}
    for record in records:
        for name, value in record.items():
            interpreter.set_tensor(inputs[name]["index"], value)
        interpreter.invoke()
        for number, name in names.items():
            with contextlib.suppress(ValueError):  # Not computed on its own.
                seen[name].append(np.ravel(interpreter.get_tensor(number)))
    sizes = {}
    for name, parts in seen.items():
        values = np.concatenate(parts or [np.zeros(1)])
        distances = np.abs(values - np.median(values))
        # Behind a ReLU most values may be 0.
        sizes[name] = float(np.median(distances) or np.mean(distances))
    return sizes


def _error_of(row: dict[str, str], sizes: dict[str, float], model: tf.keras.Model) -> LayerError:
    scale = float(row["scale"])
    rmse = float(row["mean_squared_error"]) ** 0.5
    # A tensor that the float file has not got is measured by the range of its 256 steps.
    size = sizes.get(row["tensor_name"], 255 * scale)
    return LayerError(
        layer=_layer_of(row["tensor_name"], row["op_name"], model),
        operator=row["op_name"],
        relative_error=rmse / size if size else 0.0,
        rmse_in_steps=rmse / scale if scale else 0.0,
        largest_error=float(row["max_abs_error"]),
    )


def _layer_of(tensor: str, operator: str, model: tf.keras.Model) -> str:
    """Returns the Keras layer of a tensor that is called "model/layer/Op;model/other/Op".

    Such a name lists all that was fused into the operator, and constants that it shares with
    others: the part that is called like the operator counts, or else the first.
    """
    if tensor.startswith(_OUTPUT):
        number = re.match(rf"{_OUTPUT}:(\d+)", tensor)
        outputs = sorted(output_names(model))
        if number and int(number[1]) < len(outputs):
            return outputs[int(number[1])]
    names = {layer.name for layer in layers_in(model)}
    parts = [part.split("/") for part in tensor.split(";")]
    kind = _OPERATIONS.get(operator)
    parts.sort(key=lambda part: kind is None or not part[-1].startswith(kind))
    for part in parts:
        for name in reversed(part[:-1]):
            if layer := layer_of_scope(name, names):
                return layer
    return tensor.split(";")[0]
