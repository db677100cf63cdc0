"""``offload`` between two devices: the most bytes that lie on one of them, and what a step costs.

Two logical CPUs play an accelerator and its host; see ``tfdist.runs.device_bytes`` for what is
counted.
"""

from __future__ import annotations

import functools
from typing import Any

from benchmarks import apart
from benchmarks.steps_in_turn import median_seconds, row

_apart = functools.partial(apart.call, "benchmarks.offload")
_WIDTH, _DEPTH, _ROWS = 512, 16, 4096
_ACCELERATOR = "CPU:1"


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Returns rows of work, baseline, ours, ratio and target: MB, and seconds, without and with."""
    rows = []
    for name, options, batch, target in (
        ("offload=activations", {"offload": "activations"}, _ROWS, 2.0),
        ("offload=optimizer", {"offload": "optimizer"}, _ROWS // 16, 1.5),
    ):
        batch = batch // 8 if quick else batch
        work = f"{name}, {_DEPTH} layers of {_WIDTH}, {batch} rows"
        kept, ours = (_apart("bytes_there", options=given, rows=batch) for given in ({}, options))
        rows.append(row(f"MB on the accelerator, {work}", kept / 1e6, ours / 1e6, target))
        times = _apart("seconds", options=options, rows=batch, steps=3 if quick else 7)
        rows.append(row(f"seconds of that step, {work}", *times, None))
    return rows


def bytes_there(options: dict[str, Any], rows: int) -> int:
    """Returns the most bytes on the accelerator at any time of a step, variables included."""
    import numpy as np
    import tensorflow as tf

    x = np.ones((2 * rows, _WIDTH), np.float32)
    _two_devices()
    with tf.device(_ACCELERATOR):
        model = _fitted(options, x, rows)
        from tfdist.runs import device_bytes

        found = device_bytes.of_a_step(model, lambda: _fit(model, x, rows))
    return found[_ACCELERATOR]


def _two_devices() -> None:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def _fitted(options: dict[str, Any], x: Any, rows: int) -> Any:
    """Returns a model after its first step, when slots lie where they are to."""
    import tensorflow as tf

    import tfdist

    def stack() -> Any:
        hidden = [tf.keras.layers.Dense(_WIDTH, "gelu") for _ in range(_DEPTH)]
        model = tf.keras.Sequential([tf.keras.Input((_WIDTH,)), *hidden])
        model.compile(tf.keras.optimizers.Adam(1e-4), "mse")
        return model

    model = tfdist.strategy("single", **options).build(stack)
    _fit(model, x, rows)
    return model


def _fit(model: Any, x: Any, rows: int) -> None:
    model.fit(x, x, batch_size=rows, verbose=0)


def seconds(options: dict[str, Any], rows: int, steps: int) -> list[float]:
    """Returns the median seconds of a step without and with ``options``, taken in turns."""
    import numpy as np
    import tensorflow as tf

    x = np.ones((rows, _WIDTH), np.float32)
    _two_devices()
    with tf.device(_ACCELERATOR):
        return median_seconds([_fitted(given, x, rows) for given in ({}, options)], x, steps)


if __name__ == "__main__":
    apart.answer((bytes_there, seconds))
