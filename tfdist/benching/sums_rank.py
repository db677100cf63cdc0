"""One rank of ``tfdist bench allreduce``. Run as ``python -m tfdist.benching.sums_rank CONFIG``."""

from __future__ import annotations

import statistics
import time
from typing import Any

import tfdist
from tfdist.compat import import_tensorflow
from tfdist.launch.events import emit
from tfdist.runs import ranks

tf = import_tensorflow()
_LEAST, _MOST = 5, 200
_BYTES_IN_ALL = 1 << 30


def measure(config: dict[str, Any]) -> None:
    with tfdist.strategy(config["strategy"], **config["options"]) as strategy:
        emit({"event": "ready"})
        collective = strategy.connect()
        for size in config["sizes"]:
            add = _sum_of(collective, tf.ones([size // 4]), f"bench.{size}")
            total = add()  # Traces; and the ranks begin together.
            assert float(total[0]) == collective.num_replicas, "the sum is no sum"
            seconds = []
            # As many on all ranks: a sum waits for the others.
            for _ in range(max(_LEAST, min(_MOST, _BYTES_IN_ALL // size // 16))):
                began = time.perf_counter()
                add()
                seconds.append(time.perf_counter() - began)
            median = statistics.median(seconds)
            emit({"event": "summed", "bytes": size, "seconds": median})


def _sum_of(collective: Any, tensor: Any, name: str) -> Any:
    """Returns what adds ``tensor`` up over the ranks, and waits for the sum: [elements]."""
    # TensorFlow's own strategies add up on their replicas alone.
    engine = getattr(collective, "strategy", None)

    @tf.function
    def add() -> Any:
        if engine is None:
            return collective.sum(tensor, name)
        totals = engine.run(lambda: collective.sum(tf.identity(tensor), name))
        return engine.experimental_local_results(totals)[0]

    return lambda: add().numpy()


if __name__ == "__main__":
    ranks.main(measure)
