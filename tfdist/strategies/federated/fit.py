"""The ``fit`` of a federated model: an epoch is a round."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, ModelError, OptionError
from tfdist.records.clients.collection import Clients
from tfdist.strategies.federated.feed import ClientFeed
from tfdist.strategies.federated.options import Options
from tfdist.strategies.federated.rounds import RoundRunner
from tfdist.strategies.federated.server import Server
from tfdist.training.binding import Binding
from tfdist.training.callbacks import JobCallbacks, for_process, have_stopped
from tfdist.training.checkpoint import DataState, keepers_among, released_after
from tfdist.training.data_errors import check_inputs, check_labels
from tfdist.training.feed import Feed
from tfdist.training.metrics import state_of
from tfdist.training.refusals import refuse_xla
from tfdist.training.scaling import EffectiveLearningRate

_SETTLED = (
    "validation_split",
    "sample_weight",
    "steps_per_epoch",
    "validation_steps",
    "validation_batch_size",
)
_EVALUATION_BATCH_SIZE = 128


class FederatedFit:
    """Takes the place of ``fit``; ``evaluate`` and ``predict`` stay those of one device.

    Args:
        dataset: the strategy's own.
    """

    def __init__(
        self,
        binding: Binding,
        server: Server,
        options: Options,
        dataset: Callable[..., Any],
    ):
        self._binding = binding
        model = self._model = binding.model
        self._collective = binding.collective
        self._server = server
        self._dataset = dataset
        self._rounds = RoundRunner(model, server, options)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        *,
        validation_data: Any = None,
        class_weight: dict[int, float] | None = None,
        initial_epoch: int = 0,
        validation_freq: int = 1,
        **options: Any,
    ) -> tf.keras.callbacks.History:
        """Trains ``epochs`` rounds.

        Args:
            x: what ``strategy.dataset`` or ``open_clients`` returned, or what they take.
            y: labels, where x is an array.
            batch_size: records of one step of all clients of a round, where x is an array.
            validation_data: what ``strategy.dataset(training=False)`` returned, or what it takes.

        Returns:
            The history: metrics of the clients' training, ``val_`` metrics, and for each round
            clients, clients_dropped, clients_failed, bytes_down, bytes_up, round_seconds and
            epsilon. Its ``rounds`` is a list of ``Round``, which names the clients.
        """
        _refuse_settled(options)
        model = self._model
        feed = self._feed(x, y, batch_size).weighted_by_class(class_weight)
        check_inputs(model, (feed.batch_spec["x"],))
        check_labels(model, (feed.batch_spec["x"], feed.batch_spec["y"]))
        refuse_xla(model)  # It may have been compiled anew.
        self._server.prepare(feed)
        callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        callbacks = [callback for callback in callbacks if callback is not None]
        fit = (feed, callbacks, epochs, verbose, validation_data, initial_epoch, validation_freq)
        with released_after(callbacks):
            return self._train(*fit)

    def _train(
        self,
        feed: ClientFeed,
        callbacks: list[Any],
        epochs: int,
        verbose: Any,
        validation_data: Any,
        initial_epoch: int,
        validation_freq: int,
    ) -> tf.keras.callbacks.History:
        model = self._model
        validation = None if validation_data is None else self._validation(validation_data)
        first = self._resume(callbacks, feed) or initial_epoch
        history = tf.keras.callbacks.History()
        history.rounds = []
        chain = JobCallbacks(
            [EffectiveLearningRate(), *for_process(callbacks, self._collective), history],
            self._collective,
            add_progbar=verbose != 0,
            model=model,
            verbose=1 if verbose == "auto" else verbose,
            epochs=epochs,
            steps=1,
        )
        if have_stopped(callbacks, self._collective):
            first = epochs
        model.stop_training = False
        chain.on_train_begin()
        logs: dict[str, Any] = {}
        for number in range(first, epochs):
            chain.on_epoch_begin(number)
            chain.on_train_batch_begin(0)
            record, sums = self._rounds.run(feed, number)
            history.rounds.append(record)
            logs = self._results(sums["metrics"]) | record.numbers()
            chain.on_train_batch_end(0, dict(logs))
            if validation is not None and (number + 1) % validation_freq == 0:
                found = model.evaluate(validation, verbose=0, return_dict=True)
                logs |= {f"val_{name}": value for name, value in found.items()}
            chain.on_epoch_end(number, logs)
            if model.stop_training:
                break
        chain.on_train_end(logs)
        model.history = history
        return history

    def _resume(self, callbacks: list[Any], feed: ClientFeed) -> int:
        model = self._model
        if hasattr(model.optimizer, "build"):  # The slots must exist to be restored.
            model.optimizer.build(model.trainable_variables)
        keepers = keepers_among(callbacks)
        if not keepers:
            return 0
        data = DataState(
            seed=feed.seed,
            num_records=feed.num_records,
            global_batch_size=feed.global_batch_size,
            steps_per_epoch=1,
            parts=len(feed.clients.ids),
        )
        return keepers[0].bind(self._binding, data).position.epoch

    def _results(self, sums: list[np.ndarray]) -> dict[str, float]:
        """Returns the results of the model's metrics from the sums of their state over clients."""
        for variable, value in zip(state_of(self._model), sums, strict=True):
            variable.assign(value)
        results = self._binding.results()
        self._model.reset_metrics()
        return {name: float(value) for name, value in results.items()}

    # Data ---------------------------------------------------------------------------------------

    def _feed(self, x: Any, y: Any, batch_size: int | None) -> ClientFeed:
        if isinstance(x, ClientFeed):
            if y is not None or batch_size is not None:
                raise OptionError(
                    "y and batch_size must be left out beside clients, which have their own",
                    received="y" if y is not None else f"batch_size={batch_size}",
                    mend="Leave it out",
                )
            return x
        if isinstance(x, Feed):
            raise DataError(
                "strategy 'federated' must train on clients",
                received="a dataset to evaluate on",
                mend="Write strategy.dataset(data, clients=...) without training=False",
            )
        source = x if y is None else (x, y)
        return self._dataset(source, global_batch_size=batch_size)

    def _validation(self, data: Any) -> Feed:
        if isinstance(data, Feed):
            return data.in_record_order()
        if isinstance(data, (ClientFeed, Clients)):
            raise DataError(
                "validation_data must be one set of records for all clients",
                received="records divided among clients",
                mend="Write strategy.dataset(data, training=False)",
            )
        return self._dataset(data, global_batch_size=_EVALUATION_BATCH_SIZE, training=False)


def refuse_one_batch(*args: Any, **options: Any) -> None:
    """Takes the place of ``train_on_batch``.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        "a model of strategy 'federated' must be trained in rounds, by clients",
        received="train_on_batch",
        mend="Call model.fit",
    )


def _refuse_settled(options: dict) -> None:
    given = [name for name in _SETTLED if options.get(name) is not None]
    if given:
        raise OptionError(
            "what the clients have settled must not be given to fit again",
            received=f"the option {given[0]}"
            if len(given) == 1
            else f"the options {', '.join(given)}",
            mend="Leave it out, or give it to strategy.dataset instead",
        )
    known = inspect.signature(tf.keras.Model.fit).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(f"fit() got an unexpected keyword argument '{unknown[0]}'")
