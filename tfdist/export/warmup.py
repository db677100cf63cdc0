"""Requests that TensorFlow Serving answers to itself before a version takes any.

The file is a TFRecord of ``tensorflow_serving/apis/prediction_log.proto``. Its messages are made
here: the package of TensorFlow Serving is not needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

#: Below the folder of a version.
WARMUP = "assets.extra/tf_serving_warmup_requests"
_PACKAGE = "tfdist.serving"
# The fields that are written; a TensorProto is held as its bytes, which are the same in a file.
_MESSAGES = {
    "ModelSpec": (("name", 1, "string"), ("signature_name", 3, "string")),
    "Input": (("key", 1, "string"), ("value", 2, "bytes")),
    "PredictRequest": (("model_spec", 1, "ModelSpec"), ("inputs", 2, "repeated Input")),
    "PredictLog": (("request", 1, "PredictRequest"),),
    "PredictionLog": (("predict_log", 6, "PredictLog"),),
}


@functools.cache
def _messages() -> dict[str, Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = {"string": kinds.TYPE_STRING, "bytes": kinds.TYPE_BYTES}
    file = descriptor_pb2.FileDescriptorProto(
        name="tfdist/serving.proto", package=_PACKAGE, syntax="proto3"
    )
    for message, fields in _MESSAGES.items():
        made = file.message_type.add(name=message)
        for name, number, text in fields:
            kind = text.removeprefix("repeated ")
            label = kinds.LABEL_OPTIONAL if kind == text else kinds.LABEL_REPEATED
            added = made.field.add(name=name, number=number, label=label)
            if kind in scalars:
                added.type = scalars[kind]
            else:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


def write_warmup(
    path: Path, name: str, signature: str, requests: Iterable[dict[str, np.ndarray]]
) -> None:
    """Writes a file of requests.

    Args:
        name: of the model.
        signature: that they ask for.
        requests: the inputs of each by name, [rows, ...].
    """
    import tensorflow as tf

    path.parent.mkdir(parents=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for request in requests:
            log = _messages()["PredictionLog"]()
            asked = log.predict_log.request
            asked.model_spec.name, asked.model_spec.signature_name = name, signature
            for key, values in request.items():
                content = tf.make_tensor_proto(values).SerializeToString()
                asked.inputs.add(key=key, value=content)
            writer.write(log.SerializeToString())


def read_warmup(path: Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields the signature and the inputs of each request in a file."""
    import tensorflow as tf
    from tensorflow.core.framework.tensor_pb2 import TensorProto

    for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        asked = _messages()["PredictionLog"].FromString(record).predict_log.request
        inputs = {
            each.key: tf.make_ndarray(TensorProto.FromString(each.value)) for each in asked.inputs
        }
        yield asked.model_spec.signature_name, inputs
