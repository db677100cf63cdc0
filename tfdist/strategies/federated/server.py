"""The server between rounds: the learning process, and its state beside the model's weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdist.strategies.federated.engine import Engine
from tfdist.strategies.federated.feed import ClientFeed
from tfdist.strategies.federated.model import ClientModel, TracedStep
from tfdist.strategies.federated.optimizers import learning_rate_of
from tfdist.strategies.federated.options import Options
from tfdist.strategies.federated.process import build_process


class Server:
    """Runs rounds on TFF. The truth about the weights is the Keras model, before and after each.

    Args:
        model: the user's compiled model.
        statistics: indices in ``model.non_trainable_variables`` of moving statistics to average.
    """

    def __init__(
        self,
        engine: Engine,
        options: Options,
        model: tf.keras.Model,
        statistics: tuple[int, ...],
    ):
        self._engine = engine
        self._options = options
        self._model = model
        self._statistics = statistics
        self._process: Any = None
        self._key: Any = None
        self._state: Any = None

    def prepare(self, feed: ClientFeed) -> None:
        """Builds the process for these clients, unless it is built."""
        num_slots = len(feed.clients.ids) if self._options.is_private else feed.num_replicas
        key = (repr(feed.batch_spec), num_slots, feed.num_replicas)
        if key == self._key:
            return
        step = TracedStep(self._model, feed.batch_spec)

        def model_fn() -> ClientModel:
            return ClientModel(step, num_slots, self._statistics)

        with self._engine.active():
            process = build_process(
                model_fn,
                self._options,
                optimizer=self._model.optimizer,
                client_rate=self._client_rate(),
                expected_clients=feed.num_replicas,
            )
            state = process.initialize()
        self._key, self._process = key, process
        if self._state is None:
            self._state = state

    def run_round(self, datasets: list[tf.data.Dataset]) -> Any:
        """Trains on these clients and updates the model's weights; returns TFF's metrics."""
        assert datasets, "TFF averages nothing to nothing without complaint"
        state = self._state._replace(global_model_weights=self._weights())
        with self._engine.active():
            if self._options.algorithm != "fedsgd":
                state = self._with_client_rate(state)
            output = self._process.next(state, datasets)
        self._state = output.state
        self._apply(output.state.global_model_weights.trainable)
        return output.metrics

    def _apply(self, trainable: Any) -> None:
        variables = self._model.trainable_variables
        if self._options.algorithm == "fedsgd":
            gradients = [tf.convert_to_tensor(gradient) for gradient in trainable]
            self._model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return
        for variable, value in zip(variables, trainable, strict=True):
            variable.assign(value)

    def _weights(self) -> Any:
        return tff.learning.models.ModelWeights(
            [variable.numpy() for variable in self._model.trainable_variables],
            [variable.numpy() for variable in self._model.non_trainable_variables],
        )

    def _client_rate(self) -> float:
        if self._options.algorithm == "fedsgd":
            return 0.0  # The clients take no step.
        return self._options.client_learning_rate or learning_rate_of(self._model.optimizer)

    def _with_client_rate(self, state: Any) -> Any:
        """A callback may have set the optimizer's learning rate for this round."""
        hparams = state.client_work
        rate = np.float32(self._client_rate())
        if hparams["learning_rate"] == rate:
            return state
        return state._replace(client_work={**hparams, "learning_rate": rate})
