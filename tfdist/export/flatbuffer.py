"""The bytes of a TFLite file: what is in them, and the same model in fewer of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import flatbuffers
import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

_IDENTIFIER = b"TFL3"
# The alignment of constants that kernels rely on (force_align of Buffer.data in schema.fbs); the
# Python classes generated from the schema forget it.
_CONSTANT_ALIGNMENT = 16


class _SharingBuilder(flatbuffers.Builder):
    """Writes equal vectors once.

    A quantized tensor has a zero point of 8 bytes for each channel, and they are all 0.
    """

    def __init__(self, size: int):
        super().__init__(size)
        self._written: dict[tuple[str, bytes], int] = {}

    def CreateNumpyVector(self, x: np.ndarray) -> int:
        key = (x.dtype.str, x.tobytes())
        if key not in self._written:
            if x.dtype == np.uint8:
                self.Prep(_CONSTANT_ALIGNMENT, x.nbytes)
            self._written[key] = super().CreateNumpyVector(x)
        return self._written[key]


def is_tflite(begin: bytes) -> bool:
    """Whether a file that begins so is one of TFLite: its name stands behind the first offset."""
    return begin[4:8] == _IDENTIFIER


def rewritten(content: bytes, raw_inputs: Iterable[str] = ()) -> bytes:
    """Returns the same model with equal vectors written once.

    Args:
        raw_inputs: names of uint8 inputs whose bytes mean their own value: scale 1, zero point 0.
            The QUANTIZE operator behind such an input turns it into the scale that was calibrated.
    """
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(bytearray(content), 0))
    for name in raw_inputs:
        _make_raw(model, name)
    builder = _SharingBuilder(len(content))
    builder.Finish(model.Pack(builder), _IDENTIFIER)
    return bytes(builder.Output())


def _make_raw(model: Any, name: str) -> None:
    (signature,) = model.signatureDefs
    (index,) = (entry.tensorIndex for entry in signature.inputs if entry.name.decode() == name)
    graph = model.subgraphs[0]
    tensor = graph.tensors[index]
    assert tensor.type == schema.TensorType.UINT8, tensor.type
    for operator in graph.operators:
        if index in operator.inputs:
            code = _code(model.operatorCodes[operator.opcodeIndex])
            assert code == schema.BuiltinOperator.QUANTIZE, code
    tensor.quantization.scale = np.array([1.0], np.float32)
    tensor.quantization.zeroPoint = np.array([0], np.int64)


def operators(content: bytes) -> list[str]:
    """Returns the names of the operators of all subgraphs, in order, such as "CONV_2D"."""
    names = {value: name for name, value in vars(schema.BuiltinOperator).items() if name.isupper()}
    model = schema.Model.GetRootAsModel(bytearray(content), 0)
    return [
        names[_code(schema.OperatorCodeT.InitFromObj(model.OperatorCodes(operator.OpcodeIndex())))]
        for graph in (model.Subgraphs(n) for n in range(model.SubgraphsLength()))
        for operator in (graph.Operators(n) for n in range(graph.OperatorsLength()))
    ]


def input_order(content: bytes) -> list[str]:
    """Returns the names of the inputs in the order of the graph, which need not be Keras'."""
    model = schema.Model.GetRootAsModel(bytearray(content), 0)
    signature = model.SignatureDefs(0)
    names = {
        entry.TensorIndex(): entry.Name().decode()
        for entry in (signature.Inputs(n) for n in range(signature.InputsLength()))
    }
    return [names[index] for index in model.Subgraphs(0).InputsAsNumpy().tolist()]


def tensor_names(content: bytes) -> dict[int, str]:
    """Returns the names of the tensors of the main graph, by number."""
    graph = schema.Model.GetRootAsModel(bytearray(content), 0).Subgraphs(0)
    return {n: graph.Tensors(n).Name().decode() for n in range(graph.TensorsLength())}


def computed_tensors(content: bytes) -> list[int]:
    """Returns the numbers of the tensors of the main graph that are no constants of the file."""
    model = schema.Model.GetRootAsModel(bytearray(content), 0)
    graph = model.Subgraphs(0)
    return [
        number
        for number in range(graph.TensorsLength())
        if model.Buffers(graph.Tensors(number).Buffer()).DataLength() == 0
    ]


def _code(operator_code: Any) -> int:
    # Codes beyond 127 are in the newer field only, the others in either.
    return max(operator_code.builtinCode, operator_code.deprecatedBuiltinCode)
