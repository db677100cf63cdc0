"""What a training feeds its model with, wherever its data lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tfdist

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy
    from tfdist.training.feed.training_data import TrainingData


def dataset(
    strategy: Strategy, source: Any, config: Mapping[str, Any], *, training: bool
) -> TrainingData:
    """Returns the batches of one split.

    Args:
        source: of the split, as ``strategy.dataset`` takes it.
        config: what ``Settings.to_config`` gives.
        training: whether it is trained on; the others are read as they are.
    """
    # Strategies of other packages may know none of these: given only where asked for.
    own: dict[str, Any] = {}
    if config["pad_to"] is not None:
        own["pad_to"] = config["pad_to"]
    if training and config["augment"]:
        own["record_fn"] = tfdist.augment(config["augment"])
    if training and config["bucket_by_length"]:
        own["bucket_by_length"] = config["bucket_by_length"]
    feed = strategy.dataset(
        source,
        global_batch_size=config["global_batch_size"],
        training=training,
        seed=config["seed"],
        **own,
    )
    limit = config["limit_steps"]
    return feed if limit is None else feed.limited(limit)
