"""Builds the learning process of an algorithm with ``tff.learning``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.compat import import_tensorflow_federated
from tfdist.strategies.federated.aggregation import make_aggregator
from tfdist.strategies.federated.optimizers import (
    Proximal,
    client_optimizer,
    server_optimizer,
)
from tfdist.strategies.federated.options import Options

tff = import_tensorflow_federated()

# 2.6 times as fast as TFF's default: only one thread of a client's work would wait for the other.
_LOOP = tff.learning.LoopImplementation.DATASET_ITERATOR
_DEFAULT_PROXIMAL_STRENGTH = 0.01


def build_process(
    model_fn: Callable[[], Any],
    options: Options,
    *,
    optimizer: Any,
    client_rate: float,
    expected_clients: int,
) -> Any:
    """Returns the ``tff.learning.templates.LearningProcess`` of the options.

    Args:
        model_fn: makes the clients' model.
        options: of the strategy.
        optimizer: the compiled Keras optimizer.
        client_rate: the clients' learning rate.
        expected_clients: in a round; privacy divides by it.
    """
    algorithms = tff.learning.algorithms
    aggregator = make_aggregator(options, expected_clients)
    server = server_optimizer(options.algorithm, options.server_rate)
    if options.algorithm == "fedsgd":
        return algorithms.build_fed_sgd(
            model_fn,
            server_optimizer_fn=server,
            model_aggregator=tff.aggregators.as_weighted_aggregator(aggregator)
            if isinstance(aggregator, tff.aggregators.UnweightedAggregationFactory)
            else aggregator,
            loop_implementation=_LOOP,
        )
    client = client_optimizer(optimizer, client_rate)
    if options.algorithm == "fedprox":
        client = Proximal(client, options.proximal_strength or _DEFAULT_PROXIMAL_STRENGTH)
    is_weighted = isinstance(aggregator, tff.aggregators.WeightedAggregationFactory)
    build = (
        algorithms.build_weighted_fed_avg if is_weighted else algorithms.build_unweighted_fed_avg
    )
    return build(
        model_fn,
        client_optimizer_fn=client,
        server_optimizer_fn=server,
        model_aggregator=aggregator,
        loop_implementation=_LOOP,
    )
