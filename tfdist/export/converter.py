"""From a plain Keras model to the bytes of a TFLite file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras
from tfdist.errors import ExportError, OptionError, TfdistError
from tfdist.export import recurrence
from tfdist.export.flatbuffer import operators, rewritten
from tfdist.export.kinds import NEEDS_DATA
from tfdist.export.models import PlainModel
from tfdist.export.quiet import quiet
from tfdist.export.samples import Rows

_TYPES = {"float32": tf.float32, "uint8": tf.uint8, "int8": tf.int8}

Rescale = tuple[float, float]


@dataclass(frozen=True)
class Conversion:
    """How a model becomes a file.

    Attributes:
        quantization: a name of ``QUANTIZATIONS``.
        calibration: records to learn ranges from; needed by int8 and int16x8.
        input_type: of the inputs that are floating-point in Keras; "auto" is uint8 where the file
            is int8 and the records are uint8, and float32 otherwise.
        output_type: of the floating-point outputs.
        rescale: (scale, offset) that raw values are multiplied by and added to inside the file.
        progress: called with records calibrated and their number.
    """

    quantization: str
    calibration: Rows | None = None
    input_type: str = "auto"
    output_type: str = "float32"
    rescale: Rescale | None = None
    progress: Callable[[int, int], None] = lambda done, total: None

    def input_type_of(self, name: str) -> str:
        if self.input_type != "auto":
            return self.input_type
        integer = self.quantization == "int8" and self.has_bytes(name)
        return "uint8" if integer else "float32"

    def has_bytes(self, name: str) -> bool:
        return self.calibration is not None and self.calibration.x[name].dtype == np.uint8

    def check(self) -> None:
        """Raises OptionError for types that this quantization has not got."""
        integers = [
            f"{side} type {kind}"
            for side, kind in (("input", self.input_type), ("output", self.output_type))
            if kind == "int8" or (side, kind) == ("output", "uint8")
        ]
        if integers and self.quantization != "int8":
            raise OptionError(
                "int8 inputs, and outputs of integers, must be those of a file quantized to int8",
                received=f"{', '.join(integers)} with {self.quantization}",
                mend="Leave them at float32, or choose int8",
            )
        if self.quantization != "int8" and self.input_type == "uint8" and self.calibration:
            others = [name for name in self.calibration.x if not self.has_bytes(name)]
            if others:
                raise OptionError(
                    "records for uint8 inputs must be bytes, 0 to 255",
                    received=f"{self.calibration.x[others[0]].dtype} records for '{others[0]}'",
                    mend="Leave out the input type, or choose int8",
                )


def convert(model: PlainModel, how: Conversion) -> bytes:
    """Returns the file. Its batch is 1, which is what an app gives it.

    Raises:
        ExportError: the model has an operator that TFLite has not got, or an unknown dimension.
        OptionError: types that the file cannot have.
    """
    how.check()
    model = recurrence.without_state(model)
    if how.quantization in NEEDS_DATA and _loops(model, how):
        model = recurrence.unrolled(model)
        if _loops(model, how):
            raise ExportError(
                f"a model for {how.quantization} must have no loops, in which TFLite learns no "
                "ranges",
                received=f"model '{model.given.name}', which loops",
                mend="Give recurrent layers unroll=True, or choose dynamic, float16 or none",
            )
    raw = _inputs_of_bytes(model, how) if how.quantization == "int8" else ()
    content = _run(model, how)
    recurrence.refuse_state(content, model.given.name)
    return rewritten(content, raw)


def make_converter(model: PlainModel, how: Conversion) -> tf.lite.TFLiteConverter:
    """Returns a converter, which can convert once."""
    function = _traced(model, how)
    # With a model of Keras 3 itself the file's weights would be any bytes.
    kept = keras.trackables.saved(model.keras)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], kept)
    if how.quantization == "none":
        return converter
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    sets = tf.lite.OpsSet
    if how.quantization == "float16":
        converter.target_spec.supported_types = [tf.float16]
    elif how.quantization == "int8":
        converter.target_spec.supported_ops = [sets.TFLITE_BUILTINS_INT8]
        converter.inference_input_type = _whole_type(model, how)
        converter.inference_output_type = _TYPES[how.output_type]
    elif how.quantization == "int16x8":
        converter.target_spec.supported_ops = [
            sets.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8
        ]
    if how.quantization in NEEDS_DATA:
        specs = input_specs(model, how)
        converter.representative_dataset = lambda: representative(specs, how)
    return converter


def _whole_type(model: PlainModel, how: Conversion) -> tf.DType:
    """The converter knows one type for all floating-point inputs."""
    kinds = {how.input_type_of(name) for name, spec in model.inputs.items() if _is_float(spec)}
    return _TYPES[kinds.pop()] if len(kinds) == 1 else tf.float32


def _inputs_of_bytes(model: PlainModel, how: Conversion) -> tuple[str, ...]:
    """Returns the inputs of an int8 file into which raw bytes go as they are."""
    if _whole_type(model, how) != tf.uint8:
        return ()
    return tuple(
        name for name, spec in model.inputs.items() if _is_float(spec) and how.has_bytes(name)
    )


def _is_float(spec: tf.TensorSpec) -> bool:
    return spec.dtype.is_floating


def input_specs(model: PlainModel, how: Conversion) -> dict[str, tf.TensorSpec]:
    """Returns what the traced function takes: a batch of one, unknown dimensions of the records."""
    specs = {}
    for name, spec in model.inputs.items():
        shape, dtype = [1, *spec.shape[1:]], spec.dtype
        if None in shape:
            if how.calibration is None:
                raise ExportError(
                    "a file for a phone must have inputs of a fixed shape",
                    received=f"input '{name}' of shape {list(spec.shape[1:])}",
                    mend="Give records of that shape with --data (data= in Python), or the whole "
                    "shape to keras.Input",
                )
            shape = [1, *how.calibration.x[name].shape[1:]]
        # Elsewhere than in an int8 file, the bytes are cast inside of it.
        if how.quantization != "int8" and _is_float(spec) and how.input_type_of(name) == "uint8":
            dtype = tf.uint8
        specs[name] = tf.TensorSpec(shape, dtype, name=name)
    return specs


def _traced(model: PlainModel, how: Conversion) -> Any:
    specs = input_specs(model, how)
    names = list(specs)

    def infer(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        values = {}
        for name, tensor in zip(names, tensors, strict=True):
            wanted = model.inputs[name]
            value = tf.cast(tensor, wanted.dtype)
            if how.rescale is not None and _is_float(wanted):
                scale, offset = how.rescale
                value = value * scale + offset
            values[name] = value
        return model(values)

    return tf.function(infer, autograph=False).get_concrete_function(*specs.values())


def representative(
    specs: dict[str, tf.TensorSpec], how: Conversion
) -> Iterator[dict[str, np.ndarray]]:
    assert how.calibration is not None
    total = len(how.calibration)
    for row in range(total):
        yield {
            name: how.calibration.x[name][row : row + 1].astype(spec.dtype.as_numpy_dtype)
            for name, spec in specs.items()
        }
        how.progress(row + 1, total)


def _loops(model: PlainModel, how: Conversion) -> bool:
    """Whether the file would loop: TFLite's calibrator crashes on that, without a message."""
    plain = replace(how, quantization="none", input_type="float32", output_type="float32")
    graph = _traced(model, plain).graph.as_graph_def()
    nodes = [*graph.node, *(node for part in graph.library.function for node in part.node_def)]
    if not any(node.op in ("While", "StatelessWhile") for node in nodes):
        return False
    return "WHILE" in operators(_run(model, plain))


def _run(model: PlainModel, how: Conversion) -> bytes:
    converter = make_converter(model, how)
    with quiet() as log:
        try:
            return converter.convert()
        except TfdistError:
            raise
        except Exception as error:
            log.seek(0)
            names = {layer.name for layer in keras.layers.layers_in(model.keras)}
            raise _explained(error, log.read().decode(errors="replace"), names) from error


def _explained(error: BaseException, log: str, names: set[str]) -> ExportError:
    text = f"{error}\n{log}"
    unknown = [
        name
        for line in re.findall(r"(?:TF Select|Custom) ops: (.+)", text)
        for name in re.split(r",\s*", line.strip())
    ]
    if unknown:
        unknown = list(dict.fromkeys(unknown))
        layers = list(
            dict.fromkeys(place for op in unknown for place in _layers_with(op, text, names))
        )
        where = f" in layer {', '.join(layers[:3])}" if layers else ""
        return ExportError(
            "a TFLite file must hold TFLite's own operators only",
            received=f"{', '.join(unknown)}{where}",
            mend="Write that layer with other operators, or export the part of the model before "
            "it with keras.Model(model.input, model.get_layer(...).output)",
        )
    if "TensorList" in text:
        return ExportError(
            "a recurrent layer must have a fixed number of steps to become TFLite's own operators",
            received="a loop of unknown length",
            mend="Give keras.Input the number of steps, and recurrent layers unroll=True",
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if "error:" in line), lines[-1] if lines else "nothing")
    return ExportError(
        "TFLite must be able to convert the model",
        received=f"an error: {type(error).__name__}: {reason[:300]}",
        mend="Try another quantization, or export a part of the model to find the layer",
    )


def _layers_with(op: str, text: str, names: set[str]) -> list[str]:
    """Returns the layers in which TensorFlow saw an operator: "model/layer/Op@function"."""
    found = re.findall(r'"([\w./-]+)@', text)
    return [
        f"'{keras.graph.layer_of_scope(parts[-2], names) or parts[-2]}'"
        for parts in (name.split("/") for name in found)
        if len(parts) > 1 and re.fullmatch(rf"{op}(_\d+)?", parts[-1])
    ]
