"""The ``fit`` of a federated model: an epoch is a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, OptionError
from tfdist.records.clients import Clients
from tfdist.strategies.federated.feed import ClientFeed
from tfdist.strategies.federated.options import Options
from tfdist.strategies.federated.server import Server
from tfdist.training.callbacks import JobCallbacks
from tfdist.training.checkpoint import Checkpoints, DataState, Start
from tfdist.training.collective import Collective
from tfdist.training.feed import Feed
from tfdist.training.metrics import state_of
from tfdist.training.misfits import check_inputs
from tfdist.training.scaling import EffectiveLearningRate


@dataclass
class Round:
    """What happened in a round.

    Attributes:
        number: counted from 1.
        clients: those whose updates were averaged.
        dropped: those that got the model and never answered.
        slow: those that did a part of their local work only.
        failed: those that were left out -> why.
        attempts: cohorts that were asked; more than 1 when too few clients answered.
        bytes_down: sent to clients.
        bytes_up: sent by clients.
        seconds: of the round, without validation.
        epsilon: of all rounds so far, when privacy is asked for.
    """

    number: int
    clients: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    attempts: int = 1
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    epsilon: float | None = None


class Rounds:
    """Replaces ``fit``; ``evaluate`` and ``predict`` stay those of one device."""

    def __init__(
        self,
        model: tf.keras.Model,
        server: Server,
        options: Options,
        collective: Collective,
        dataset: Callable[..., Any],
    ):
        self._model = model
        self._server = server
        self._options = options
        self._collective = collective
        self._dataset = dataset
        self._named: set[str] = set()

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        epochs: int = 1,
        initial_epoch: int = 0,
        callbacks: Any = None,
        validation_data: Any = None,
        validation_freq: int = 1,
        verbose: Any = "auto",
        class_weight: dict[int, float] | None = None,
        **options: Any,
    ) -> tf.keras.callbacks.History:
        """Trains ``epochs`` rounds; see ``Federated``."""
        model = self._model
        feed = self._feed(x, y, options).weighted_by_class(class_weight)
        check_inputs(model, (feed.batch_spec["x"],))
        history = tf.keras.callbacks.History()
        chain = JobCallbacks(
            [EffectiveLearningRate(), *_listed(callbacks), history],
            self._collective,
            add_progbar=verbose != 0,
            model=model,
            verbose=1 if verbose == "auto" else verbose,
            epochs=epochs,
            steps=1,
        )
        self._server.prepare(feed)
        validation = None if validation_data is None else self._validation(validation_data)
        start = initial_epoch
        history.rounds = []
        model.stop_training = False
        chain.steps_in_epoch = 1
        chain.on_train_begin()
        logs: dict[str, Any] = {}
        for number in range(start, epochs):
            model.reset_metrics()
            chain.on_epoch_begin(number)
            chain.on_train_batch_begin(0)
            record, logs = self._round(feed, number)
            history.rounds.append(record)
            chain.on_train_batch_end(0, dict(logs))
            if validation is not None and (number + 1) % validation_freq == 0:
                found = model.evaluate(
                    validation, verbose=0, return_dict=True, callbacks=None
                )
                logs |= {f"val_{name}": value for name, value in found.items()}
            chain.on_epoch_end(number, logs)
            if model.stop_training:
                break
        chain.on_train_end(logs)
        model.history = history
        return history

    # One round ----------------------------------------------------------------------------------

    def _round(self, feed: ClientFeed, number: int) -> tuple[Round, dict[str, Any]]:
        begun = time.perf_counter()
        record = Round(number + 1)
        cohort = feed.sampler.cohort(feed.clients.ids, number)
        ids, datasets = [], []
        for client in cohort.answering:
            arrays = feed.load(client)
            share = cohort.shares.get(client)
            datasets.append(feed.batches(arrays, len(ids), number, share))
            ids.append(client)
        metrics = self._server.run_round(datasets)
        sums = metrics["client_work"]["train"]
        record.clients = tuple(
            client for client, present in zip(ids, sums["present"][0], strict=False) if present
        )
        record.seconds = time.perf_counter() - begun
        logs = self._results(sums["metrics"])
        logs |= {"clients": len(record.clients), "seconds": record.seconds}
        return record, logs

    def _results(self, sums: list[np.ndarray]) -> dict[str, float]:
        """Returns the results of the model's metrics from the sums of their state over clients."""
        for variable, value in zip(state_of(self._model), sums, strict=True):
            variable.assign(value)
        return {name: float(value) for name, value in self._model.get_metrics_result().items()}

    # Data ---------------------------------------------------------------------------------------

    def _feed(self, x: Any, y: Any, options: dict) -> ClientFeed:
        if isinstance(x, ClientFeed):
            return x
        return self._dataset(x if y is None else (x, y))

    def _validation(self, data: Any) -> Any:
        if isinstance(data, Feed):
            return data.in_record_order()
        return self._dataset(data, global_batch_size=128, training=False)


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
