"""Rounds of federated averaging in Flower's simulation: python flower_rounds.py IN_NPZ OUT_JSON.

Runs in Flower's own environment, so it imports nothing of this project. IN_NPZ: x, y; starts, sizes
of the clients' records in them; blocks of the convnet as JSON, cohort, batch_size, learning_rate,
rounds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "1"}

import flwr
import numpy as np
from convnet import convnet


def make_model(shape, blocks, rate: float):
    from tensorflow import keras

    model = convnet(keras, shape, blocks)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])
    return model


class Client(flwr.client.NumPyClient):
    def __init__(self, x, y, batch_size, model):
        self._x, self._y, self._batch_size, self._model = x, y, batch_size, model

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
    x, y, starts, sizes = (given[name] for name in ("x", "y", "starts", "sizes"))
    number, cohort, batch_size = len(sizes), int(given["cohort"]), int(given["batch_size"])
    model = x.shape[1:], json.loads(str(given["blocks"])), float(given["learning_rate"])

    def client_of(cid: str) -> flwr.client.Client:
        rows = slice(starts[int(cid)], starts[int(cid)] + sizes[int(cid)])
        return Client(x[rows], y[rows], batch_size, make_model(*model)).to_client()

    weights = make_model(*model).get_weights()
    strategy = Timed(
        fraction_fit=cohort / number,
        fraction_evaluate=0.0,
        min_fit_clients=cohort,
        min_available_clients=number,
        initial_parameters=flwr.common.ndarrays_to_parameters(weights),
    )
    strategy.ends = []
    flwr.simulation.start_simulation(
        client_fn=client_of,
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
