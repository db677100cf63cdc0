"""A model that meets with a mishap, where and how the environment variable MISHAP says.

MISHAP is JSON: "place" (data, build, trace, epoch, evaluation, part, checkpoint or save), "rank",
"after" (how often the place is passed first), and what happens: "limit" (no file may grow beyond so
many bytes from here on, as on a full disk), "damage" (a file, one byte of whose middle is changed),
"cut" (a file, whose second half is lost), or else the place is told on standard output and the
process waits for a signal.
"""

from __future__ import annotations

import json
import os
import resource
import time

import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers
from tensorflow.python.ops import gen_io_ops

from tfdist import topology
from tfdist.records.reading import reader
from tfdist.training.memory import part_files

# So small a shard would be kept in memory, where no damage to the file can reach it.
reader.TABLE_BYTES = 0
MISHAP = json.loads(os.environ.get("MISHAP", "{}"))


def pass_by(place: str) -> None:
    if MISHAP.get("place") != place or MISHAP["rank"] != topology.current().rank:
        return
    MISHAP["after"] -= 1
    if MISHAP["after"] >= 0:
        return
    del MISHAP["place"]
    if "limit" in MISHAP:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MISHAP["limit"], hard))
    elif "damage" in MISHAP:
        with open(MISHAP["damage"], "r+b") as file:
            middle = os.path.getsize(MISHAP["damage"]) // 2
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 0xFF]))
    elif "cut" in MISHAP:
        os.truncate(MISHAP["cut"], os.path.getsize(MISHAP["cut"]) // 2)
    else:
        print(f"at {place}", flush=True)
        time.sleep(600)


class Road(layers.Layer):
    """Gives its input on, and passes by the places of a step."""

    def call(self, x, training=None):
        if training is True:
            pass_by("trace")
        place = "epoch" if training else "evaluation"
        with tf.control_dependencies([tf.py_function(lambda: pass_by(place), [], [])]):
            return tf.identity(x)

    def save_own_variables(self, store):
        pass_by("save")
        super().save_own_variables(store)


def _batches(records, *args, _batches=reader.Records.batches, **options):
    def passed_by(*batch):
        with tf.control_dependencies([tf.py_function(lambda: pass_by("data"), [], [])]):
            return tf.nest.map_structure(tf.identity, batch)

    return _batches(records, *args, **options).map(passed_by)


if MISHAP.get("place") == "data":
    reader.Records.batches = _batches


def _merge(*args, _merge=gen_io_ops.merge_v2_checkpoints, **options):
    pass_by("checkpoint")  # All is written, but under temporary names.
    return _merge(*args, **options)


gen_io_ops.merge_v2_checkpoints = _merge


def _write_part(*args, _write=part_files.write, **options):
    found = _write(*args, **options)
    pass_by("part")  # This rank's is written, the others may be about it.
    return found


def _merge_parts(*args, _merge=part_files.merge):
    pass_by("checkpoint")
    _merge(*args)


part_files.write, part_files.merge = _write_part, _merge_parts


def model_fn():
    pass_by("build")
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), Road(), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model
