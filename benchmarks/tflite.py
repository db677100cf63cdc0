"""TFLite files of MobileNetV2 at 96x96 against Keras, on the same images, one at a time.

The rounds of all run in turn. Sizes are against the float32 file of TensorFlow's converter.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_TARGET_SPEED = 20
_TARGET_INT8_SIZE = 1 / 0.30
_FILES = ("none", "dynamic", "float16", "int8")


def run(quick: bool = False) -> list[dict]:
    """Returns rows: baseline and ours in invocations/s, or in MB; ratio, target."""
    import tensorflow as tf

    import tfdist
    from tfdist.export.quiet import quiet

    tf.keras.utils.set_random_seed(0)
    files = ("none", "int8") if quick else _FILES
    width = 0.35 if quick else 1.0
    model = tf.keras.applications.MobileNetV2((96, 96, 3), alpha=width, weights=None)
    images = np.random.default_rng(0).integers(0, 256, (20, 96, 96, 3)).astype(np.uint8)
    with quiet():
        by_hand = tf.lite.TFLiteConverter.from_keras_model(model).convert()
    contents = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in files:
            path = Path(folder) / f"{name}.tflite"
            tfdist.export.tflite(
                model,
                path,
                quantize=name,
                data=(images,),
                rescale=(1 / 127.5, -1.0),
                samples=20,
                parity_samples=1,
                max_drop=1e9,
                layers=False,
            )
            contents[name] = path.read_bytes()
    image = (images[:1] / 127.5 - 1).astype(np.float32)
    works = {"predict": lambda: model.predict(image, verbose=0)}
    for name, content in contents.items():
        for threads in (1, 2):
            works[f"{name} {threads}"] = _invoker(content, images[:1], threads)
    times = _in_turn(works, 3 if quick else 40)
    rows = [_speed(name, threads, times) for name in contents for threads in (1, 2)]
    return rows + [_size(name, content, by_hand) for name, content in contents.items()]


def _invoker(content: bytes, image: np.ndarray, threads: int) -> Callable[[], Any]:
    import tensorflow as tf

    from tfdist.export.quiet import quiet

    with quiet():
        interpreter = tf.lite.Interpreter(model_content=content, num_threads=threads)
        interpreter.allocate_tensors()
    (given,), (taken,) = interpreter.get_input_details(), interpreter.get_output_details()
    value = image.astype(given["dtype"])

    def invoke() -> np.ndarray:
        interpreter.set_tensor(given["index"], value)
        interpreter.invoke()
        return interpreter.get_tensor(taken["index"])

    return invoke


def _in_turn(works: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    for work in works.values():
        work()
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    return times


def _speed(name: str, threads: int, times: dict[str, list[float]]) -> dict:
    ours = times[f"{name} {threads}"]
    pairs = zip(times["predict"], ours, strict=True)
    return {
        "work": f"tflite {name}, {threads} threads: invocations/s against Keras' predict",
        "baseline": round(1 / statistics.median(times["predict"]), 1),
        "ours": round(1 / statistics.median(ours), 1),
        "ratio": round(statistics.median(keras / file for keras, file in pairs), 1),
        "target": _TARGET_SPEED if (name, threads) == ("none", 1) else None,
    }


def _size(name: str, content: bytes, by_hand: bytes) -> dict:
    return {
        "work": f"tflite {name}: MB against the converter's float32 file",
        "baseline": round(len(by_hand) / 1e6, 3),
        "ours": round(len(content) / 1e6, 3),
        "ratio": round(len(by_hand) / len(content), 2),
        "target": round(_TARGET_INT8_SIZE, 2) if name == "int8" else None,
    }
