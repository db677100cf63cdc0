"""How fast a file runs on this machine, and how much memory it takes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfdist.export.flatbuffer import computed_tensors
from tfdist.export.interpreter import TfliteModel, opened
from tfdist.traces import intervals

THREADS = (1, 2)
_WARM_UP = 5
_MIN_RUNS, _MAX_RUNS, _SECONDS = 30, 1000, 1.0


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one invocation on a batch of one, on this machine.

    Attributes:
        threads: of the interpreter.
        p50_ms, p90_ms: median and ninth decile over ``runs``.
    """

    threads: int
    p50_ms: float
    p90_ms: float
    runs: int


@dataclass(frozen=True)
class Benchmark:
    """Attributes:
    latencies: one for each of ``THREADS``.
    arena_bytes: memory of activations and scratch; see ``arena_bytes``.
    """

    latencies: tuple[Latency, ...]
    arena_bytes: int


def benchmark(content: bytes, record: dict[str, np.ndarray]) -> Benchmark:
    """Measures a file.

    Args:
        record: name -> raw values [1, ...].
    """
    latencies = tuple(_latency(content, record, threads) for threads in THREADS)
    return Benchmark(latencies, arena_bytes(content))


def _latency(content: bytes, record: dict[str, np.ndarray], threads: int) -> Latency:
    file = TfliteModel(content)
    interpreter = opened(content, num_threads=threads)
    # As an app does it: inputs are set before the clock starts.
    for name, value in file.encoded(record).items():
        interpreter.set_tensor(file.inputs[name]["index"], value)
    for _ in range(_WARM_UP):
        interpreter.invoke()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < _MIN_RUNS or (
        len(times) < _MAX_RUNS and time.perf_counter() - begun < _SECONDS
    ):
        start = time.perf_counter()
        interpreter.invoke()
        times.append((time.perf_counter() - start) * 1e3)
    p50, p90 = np.percentile(times, (50, 90))
    return Latency(threads, float(p50), float(p90), len(times))


def arena_bytes(content: bytes) -> int:
    """Returns the bytes that TFLite's built-in kernels need for activations and scratch.

    Measured: the addresses that the interpreter gave to its tensors, shared ones counted once,
    plus the scratch tensors of the kernels, which it does not show and which may share memory.
    Weights stay in the file and are not counted.
    """
    # The delegate XNNPACK keeps its memory to itself.
    kernels = tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = opened(content, experimental_op_resolver_type=kernels)
    ranges = []
    for number in computed_tensors(content):
        try:
            view = interpreter.tensor(number)()
        except ValueError:
            continue  # Not in memory: fused away, or of a dynamic shape.
        address = view.__array_interface__["data"][0]
        ranges.append((address, address + view.nbytes))
        del view
    scratch = sum(
        int(np.prod(tensor["shape"])) * np.dtype(tensor["dtype"]).itemsize
        for tensor in interpreter.get_tensor_details()
        if not tensor["name"]
    )
    return int(intervals.length(intervals.union(ranges))) + scratch
