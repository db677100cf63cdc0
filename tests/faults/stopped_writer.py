"""Run by ``tfdist launch``: rank 1 stops itself while all ranks write a checkpoint in parts.

Arguments: the folder of the checkpoints.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
from tensorflow import keras

import tfdist
from tfdist.training.memory import part_files


def model_fn() -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    return model


with tfdist.strategy("horovod", shard="optimizer", stall_timeout_s=1) as strategy:
    write = part_files.write

    def stopped(*args: Any, **options: Any) -> bool:
        if strategy.topology.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return write(*args, **options)

    part_files.write = stopped
    x, y = np.zeros((32, 8), np.float32), np.zeros((32, 4), np.float32)
    keep = tfdist.Checkpoints(sys.argv[1])
    strategy.build(model_fn).fit(x, y, batch_size=16, callbacks=[keep], verbose=0)
