"""The options of the train step: what they save in memory, and what that costs in time."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

from benchmarks import apart
from benchmarks.steps_in_turn import median_seconds, row

_apart = functools.partial(apart.call, "benchmarks.step_options")
_WIDTH, _DEPTH, _ROWS = 256, 16, 8192


def run(quick: bool = False) -> list[dict[str, Any]]:
    cases = (
        ("accumulate_steps=4", {"accumulate_steps": 4}, 2.0),
        ("recompute=blocks", {"recompute": "blocks"}, 1.5),
        ("both", {"accumulate_steps": 4, "recompute": "blocks"}, 2.0),
    )
    with tempfile.TemporaryDirectory(prefix="tfdist-offload-") as folder:
        to_disk = {"offload": "activations", "offload_dir": folder}
        cases = (*cases, ("offload=activations to a disk", to_disk, 2.0))
        rows, kept = [], _peak_mb({}, quick)
        for name, options, target in cases:
            ours = _peak_mb(options, quick)
            rows.append(
                row(f"peak memory of a step, {name}, {_DEPTH} layers", kept, ours, target),
            )
            plain, ours = _seconds(options, steps=3 if quick else 7)
            rows.append(row(f"seconds of that step, {name}", plain, ours, None))
    for batch in (1, 2):
        kept, ours = (
            _apart("peak_on_mesh", batch=batch, recompute=way, rows=_ROWS // 8 if quick else _ROWS)
            for way in ("none", "blocks")
        )
        work = f"peak memory of a step, recompute=blocks on a mesh {batch}x2, {_DEPTH} layers"
        rows.append(row(work, kept, ours, 1.5))
    return rows


def _peak_mb(options: dict[str, Any], quick: bool) -> float:
    return _apart("peak", options=options, rows=_ROWS // 8 if quick else _ROWS)


def _seconds(options: dict[str, Any], steps: int) -> list[float]:
    return _apart("seconds", options=options, steps=steps)


def _model(options: dict[str, Any]) -> Any:
    import tfdist

    return tfdist.strategy("single", **options).build(_stack)


def _stack() -> Any:
    import tensorflow as tf

    layers = tf.keras.layers
    hidden = [layers.Dense(_WIDTH, "gelu") for _ in range(_DEPTH)]
    model = tf.keras.Sequential([tf.keras.Input((_WIDTH,)), *hidden])
    model.compile(tf.keras.optimizers.SGD(1e-3), "mse")
    return model


def peak(options: dict[str, Any], rows: int) -> float:
    """Returns the MB that two steps take at the peak, beside those at rest."""
    import numpy as np

    from benchmarks.pipeline import peak_mb

    x = np.ones((rows, _WIDTH), np.float32)
    return peak_mb(_model(options), x, x)


def peak_on_mesh(batch: int, recompute: str, rows: int) -> float:
    """Returns what ``peak`` does, of a fit of one step; its tracing is in it."""
    import numpy as np

    import tfdist
    from benchmarks.pipeline import peak_of

    x = np.ones((rows, _WIDTH), np.float32)
    with tfdist.strategy("mesh", batch=batch, model=2, recompute=recompute) as strategy:
        model = strategy.build(_stack)
        model.fit(x[:64], x[:64], batch_size=64, verbose=0)
        return peak_of(lambda: model.fit(x, x, batch_size=rows, shuffle=False, verbose=0))


def seconds(options: dict[str, Any], steps: int) -> list[float]:
    """Returns the median seconds of a step without and with ``options``, taken in turns."""
    import numpy as np

    x = np.ones((_ROWS // 4, _WIDTH), np.float32)
    return median_seconds([_model({}), _model(options)], x, steps)


if __name__ == "__main__":
    apart.answer((peak, peak_on_mesh, seconds))
