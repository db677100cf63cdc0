"""Rounds of federated averaging in Flower's simulation: python flower_rounds.py IN_NPZ OUT_JSON.

Runs in Flower's own environment, so it imports nothing of this project. IN_NPZ: x, y of all
clients, batch_size, learning_rate, rounds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import flwr
import numpy as np


def make_model(rate: float):
    from tensorflow import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPool2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])
    return model


class Client(flwr.client.NumPyClient):
    def __init__(self, x, y, batch_size, rate):
        self._x, self._y, self._batch_size = x, y, batch_size
        self._model = make_model(rate)

    def fit(self, parameters, config):
        self._model.set_weights(parameters)
        self._model.fit(self._x, self._y, batch_size=self._batch_size, verbose=0)
        return self._model.get_weights(), len(self._x), {}


class Timed(flwr.server.strategy.FedAvg):
    """Notes when each round's updates have been averaged."""

    ends: list[float]

    def aggregate_fit(self, server_round, results, failures):
        averaged = super().aggregate_fit(server_round, results, failures)
        assert not failures, failures
        self.ends.append(time.perf_counter())
        return averaged


def main(data: str, out: str) -> None:
    given = np.load(data, allow_pickle=False)
    x, y, number = given["x"], given["y"], len(given["x"])
    batch_size, rate = int(given["batch_size"]), float(given["learning_rate"])
    strategy = Timed(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=number,
        min_available_clients=number,
        initial_parameters=flwr.common.ndarrays_to_parameters(make_model(rate).get_weights()),
    )
    strategy.ends = []
    flwr.simulation.start_simulation(
        client_fn=lambda cid: Client(x[int(cid)], y[int(cid)], batch_size, rate).to_client(),
        num_clients=number,
        config=flwr.server.ServerConfig(num_rounds=int(given["rounds"])),
        strategy=strategy,
        client_resources={"num_cpus": 1},
        ray_init_args={"num_cpus": os.cpu_count(), "include_dashboard": False},
    )
    seconds = np.diff(strategy.ends)
    Path(out).write_text(json.dumps([float(value) for value in seconds]))


if __name__ == "__main__":
    main(*sys.argv[1:])
