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

from tfdist.records.format.message_classes import message_classes

#: Below the folder of a version.
WARMUP = "assets.extra/tf_serving_warmup_requests"
# The fields that are written; a TensorProto is held as its bytes, which are the same in a file.
_MESSAGES = {
    "ModelSpec": "string name 1, string signature_name 3",
    "Input": "string key 1, bytes value 2",
    "PredictRequest": "ModelSpec model_spec 1, repeated Input inputs 2",
    "PredictLog": "PredictRequest request 1",
    "PredictionLog": "PredictLog predict_log 6",
}


@functools.cache
def _messages() -> dict[str, Any]:
    return message_classes("tfdist.serving", _MESSAGES)


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
