"""Rounds of federated averaging in pfl-research's simulation: python pfl_rounds.py IN_NPZ OUT_JSON.

Runs in pfl's own environment, so it imports nothing of this project; one process, whose TensorFlow
has all cores. IN_NPZ: see flower_rounds.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "1"}  # As pfl's examples are.

import numpy as np
import tensorflow as tf
from convnet import convnet
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.tensorflow import TFModel


class Timed(TrainingProcessCallback):
    """Notes when each round's updates have been averaged."""

    def __init__(self):
        self.ends: list[float] = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.ends.append(time.perf_counter())
        return False, Metrics()


def main(data: str, out: str) -> None:
    given = np.load(data, allow_pickle=False)
    rate, starts, sizes = float(given["learning_rate"]), given["starts"], given["sizes"]
    x, y = tf.constant(given["x"]), tf.constant(given["y"])

    def of_client(client: int) -> Dataset:
        rows = slice(starts[client], starts[client] + sizes[client])
        return Dataset((x[rows], y[rows]), user_id=str(client))

    model = convnet(tf.keras, x.shape[1:], json.loads(str(given["blocks"])))
    model.compile(
        tf.keras.optimizers.SGD(rate), tf.keras.losses.SparseCategoricalCrossentropy(True)
    )
    timed = Timed()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=int(given["rounds"]),
            evaluation_frequency=10**9,
            train_cohort_size=int(given["cohort"]),
            val_cohort_size=0,
        ),
        SimulatedBackend(
            training_data=FederatedDataset(of_client, MinimizeReuseUserSampler(range(len(sizes)))),
            val_data=None,
        ),
        TFModel(model, metrics={}, central_optimizer=tf.keras.optimizers.SGD(1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=rate,
            local_batch_size=int(given["batch_size"]),
        ),
        callbacks=[timed],
    )
    seconds = np.diff(timed.ends)
    Path(out).write_text(json.dumps([float(value) for value in seconds]))


if __name__ == "__main__":
    main(*sys.argv[1:])
