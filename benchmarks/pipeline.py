"""How much of the ideal overlap a pipeline reaches, what it keeps in memory, what freezing saves.

Overlap is measured with layers that sleep in proportion to their rows, so stages do not compete
for cores: the schedule and what TensorFlow adds to it are all that is measured. Memory is the peak
of the process's resident set, each schedule in a process of its own. What frozen layers save is
measured on a convnet, epoch by epoch in turn, with all layers trained, with frozen ones, and with
their outputs kept.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any

from benchmarks import apart

_apart = functools.partial(apart.call, "benchmarks.pipeline")
_SECONDS_PER_ROW = 0.010
_ROWS = 32
_M_MMAP_THRESHOLD = -3  # Of malloc.h.


def run(quick: bool = False) -> list[dict]:
    """Returns rows of work, baseline, ours, ratio and target.

    For overlap: seconds a step without and with a pipeline, and the speed-up over the ideal
    M S / (M + S - 1). For memory: MB at the peak with GPipe, with the schedule, and how many times
    less that is. For frozen layers: seconds, or MB, without and with.
    """
    rows = []
    for stages, name in ((2, "gpipe"), (2, "1f1b"), (4, "gpipe"), (4, "1f1b")):
        if quick and name == "1f1b":
            continue
        rows.append(_overlap(stages, 8, name, steps=3 if quick else 7))
    rows += _frozen(quick)
    if not quick:
        rows += _memory()
    return rows


def _frozen(quick: bool) -> list[dict]:
    trained, frozen, kept, filling = _apart("frozen", rounds=2 if quick else 5)
    rows = [
        ("an epoch, frozen layers do not go backward", trained, frozen, 1.5),
        ("an epoch, outputs of frozen layers kept, over frozen", frozen, kept, 5.0),
        (
            "10 epochs, outputs of frozen layers kept, filling counted, over frozen",
            10 * frozen,
            10 * kept + filling,
            2.0,
        ),
    ]
    if not quick:
        peaks = [_apart("frozen_memory", freeze=freeze)[0] for freeze in (False, True)]
        rows.append(("peak memory, frozen layers do not go backward", *peaks, 2.0))
    return [
        {
            "work": f"{work}, S=2 M=4",
            "baseline": round(baseline, 3),
            "ours": round(ours, 3),
            "ratio": round(baseline / ours, 3),
            "target": target,
        }
        for work, baseline, ours, target in rows
    ]


def _overlap(stages: int, microbatches: int, schedule: str, steps: int) -> dict:
    (alone,) = _apart("overlap", stages=stages, microbatches=1, schedule="gpipe", steps=steps)
    (ours,) = _apart(
        "overlap", stages=stages, microbatches=microbatches, schedule=schedule, steps=steps
    )
    ideal = microbatches * stages / (microbatches + stages - 1)
    return {
        "work": f"overlap, {schedule}, S={stages} M={microbatches}, ideal {ideal:.2f}",
        "baseline": round(alone, 4),
        "ours": round(ours, 4),
        "ratio": round(alone / ours / ideal, 3),
        "target": 0.90,
    }


def _memory() -> list[dict]:
    def peak(schedule: str, recompute: str) -> float:
        return _apart("memory", schedule=schedule, recompute=recompute)[0]

    baseline = peak("gpipe", "none")
    rows = []
    for schedule, recompute in (("gpipe", "blocks"), ("1f1b", "none"), ("1f1b", "blocks")):
        ours = peak(schedule, recompute)
        how = f"{schedule}, recompute" if recompute == "blocks" else schedule
        rows.append(
            {
                "work": f"peak memory, {how}, S=2 M=8",
                "baseline": round(baseline, 1),
                "ours": round(ours, 1),
                "ratio": round(baseline / ours, 3),
                "target": 4.0 if (schedule, recompute) == ("1f1b", "blocks") else 2.0,
            }
        )
    return rows


def _sleeping_layer() -> Any:
    import numpy as np
    import tensorflow as tf

    def nap(x: np.ndarray) -> np.ndarray:
        time.sleep(len(x) * _SECONDS_PER_ROW / 3)
        return x

    # Not stateful: TensorFlow would otherwise put all naps of a step in one row.
    @tf.custom_gradient
    def sleep(x: tf.Tensor) -> Any:
        def back(dy: tf.Tensor) -> tf.Tensor:
            for _ in range(2):  # As long as two forward passes, like a layer's.
                dy = tf.ensure_shape(
                    tf.numpy_function(nap, [dy], dy.dtype, stateful=False), dy.shape
                )
            return dy

        y = tf.numpy_function(nap, [x], x.dtype, stateful=False)
        return tf.ensure_shape(y, x.shape), back

    class Sleep(tf.keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight("scale", [1], initializer="ones")

        def call(self, x: Any) -> Any:
            return sleep(x * self.scale)

    return Sleep


def overlap(stages: int, microbatches: int, schedule: str, steps: int) -> list[float]:
    """Returns the median seconds of a step."""
    import statistics

    import numpy as np
    import tensorflow as tf

    import tfdist

    layer = _sleeping_layer()

    def model_fn() -> Any:
        model = tf.keras.Sequential([tf.keras.Input((4,)), *(layer() for _ in range(stages))])
        model.compile(tf.keras.optimizers.SGD(1e-3), "mse")
        return model

    x = np.ones((_ROWS, 4), np.float32)
    with tfdist.strategy(
        "pipeline", stages=stages, microbatches=microbatches, schedule=schedule
    ) as strategy:
        model = strategy.build(model_fn)
        step = model.make_train_function()
        batches = iter(tf.data.Dataset.from_tensors((x, x)).repeat())
        step(batches)
        step(batches)
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step(batches)["loss"].numpy()
            times.append(time.perf_counter() - start)
        return [statistics.median(times)]


def memory(schedule: str, recompute: str) -> list[float]:
    """Returns the MB that two steps of a wide model take at the peak, beside those at rest."""
    # What is freed goes back at once: else a peak is what the allocator has kept by chance, too.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1_000_000)
    import numpy as np
    import tensorflow as tf

    import tfdist

    def model_fn() -> Any:
        layers = tf.keras.layers
        model = tf.keras.Sequential([tf.keras.Input((64,))])
        for _ in range(8):
            model.add(layers.Dense(64, "gelu"))
        model.compile(tf.keras.optimizers.SGD(1e-3), "mse")
        return model

    x = np.ones((65536, 64), np.float32)
    with tfdist.strategy(
        "pipeline", stages=2, microbatches=8, schedule=schedule, recompute=recompute
    ) as strategy:
        return [peak_mb(strategy.build(model_fn), x, x)]


def peak_mb(model: Any, x: Any, y: Any) -> float:
    """Returns the MB that two steps take at the peak, beside those at rest."""
    import tensorflow as tf

    def batches_of(rows: int) -> Any:
        # A dataset that may end on a short batch: one trace then serves all sizes.
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows).repeat()
        options = tf.data.Options()  # A batch read ahead is there, or not yet, by chance.
        options.experimental_optimization.inject_prefetch = False
        return iter(batches.with_options(options))

    step = model.make_train_function()
    batches, small = batches_of(len(x)), batches_of(64)
    next(batches)
    step(small)  # Traced, and the kernels loaded.

    def run() -> None:
        for _ in range(2):
            step(batches)["loss"].numpy()

    return peak_of(run)


def peak_of(run: Callable[[], Any]) -> float:
    """Returns the MB that the process holds at the peak of ``run``, beside those before it."""
    import threading

    import psutil

    process, peak, done = psutil.Process(), [0], threading.Event()
    rest = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return (peak[0] - rest) / 1e6


def _backbone_and_head() -> Any:
    import tensorflow as tf

    layers = tf.keras.layers
    backbone = tf.keras.Sequential([tf.keras.Input((32, 32, 3))], name="backbone")
    for filters in (32, 32, 64, 64):
        backbone.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        backbone.add(layers.BatchNormalization())
        backbone.add(layers.Activation("relu"))
    backbone.add(layers.GlobalAveragePooling2D())
    inputs = tf.keras.Input((32, 32, 3))
    x = layers.Dense(256, "relu")(backbone(inputs))
    model = tf.keras.Model(inputs, layers.Dense(10)(x))
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def frozen(rounds: int) -> list[float]:
    """Returns median seconds of an epoch trained, frozen, kept; and seconds to fill the cache."""
    import statistics

    import numpy as np

    import tfdist

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(512, 32, 32, 3)).astype(np.float32), rng.integers(0, 10, 512)
    options = (
        {},
        {"freeze_until": "backbone"},
        {"freeze_until": "backbone", "frozen_cache": "memory"},
    )
    runs = []
    for chosen in options:
        strategy = tfdist.strategy("pipeline", stages=2, microbatches=4, **chosen)
        strategy.start()
        model = strategy.build(_backbone_and_head)
        feed = strategy.dataset((x, y), global_batch_size=64)
        model.fit(feed, verbose=0)  # Traced, and the cache filled.
        runs.append((model, feed))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for own, (model, feed) in zip(times, runs, strict=True):
            own.append(_seconds(lambda model=model, feed=feed: model.fit(feed, verbose=0)))
    # New weights: the same model fills its cache again, without tracing anything.
    model, feed = runs[-1]
    model.set_weights([weight * 0.9 for weight in model.get_weights()])
    again = _seconds(lambda: model.fit(feed, verbose=0))
    medians = [statistics.median(own) for own in times]
    return [*medians, max(again - medians[-1], 0.0)]


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def frozen_memory(freeze: bool) -> list[float]:
    """Returns the MB that two steps take at the peak, beside those at rest."""
    import numpy as np

    import tfdist

    x = np.random.default_rng(0).normal(size=(256, 32, 32, 3)).astype(np.float32)
    chosen = {"freeze_until": "backbone"} if freeze else {"batch_norm": "per_microbatch"}
    with tfdist.strategy("pipeline", stages=2, microbatches=4, **chosen) as strategy:
        return [peak_mb(strategy.build(_backbone_and_head), x, np.zeros(256, np.int64))]


if __name__ == "__main__":
    apart.answer((overlap, memory, frozen, frozen_memory))
