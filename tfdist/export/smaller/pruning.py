"""Pruning: the smallest weights become 0, while the model trains on.

To prune, or not to prune, Zhu and Gupta 2017, arXiv:1710.01878.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdist.errors import OptionError
from tfdist.export.smaller import tuning
from tfdist.export.smaller.measuring import Comparison

if TYPE_CHECKING:
    import tensorflow as tf

# Of the training, to reach the sparsity in; the rest lets the other weights settle.
_RAMP = 0.7


def prune(
    model: tf.keras.Model,
    data: Any,
    *,
    sparsity: float = 0.5,
    epochs: int = 4,
    global_batch_size: int = 64,
    seed: int = 0,
) -> tuple[tf.keras.Model, Comparison]:
    """Sets the smallest weights of each dense and convolutional kernel to 0.

    The file stays as large; what shrinks is the file compressed, as it is inside of an app that is
    downloaded. The given model is left as it is.

    Args:
        model: compiled; its loss, metrics and optimizer are used to train on.
        data: a folder of shards, trained on the split train and measured on validation; or
            "DIR/SPLIT", arrays or an unbatched dataset for both.
        sparsity: share of the weights that become 0, between 0 and 1.
        epochs: to train for.
        global_batch_size: records in a step.
        seed: of the order of records.

    Returns:
        An ordinary compiled Keras model, and size and quality before and after.

    Raises:
        ModelError: not a compiled Functional or Sequential model. OptionError: a sparsity that
            cannot be. EngineMissingError: tensorflow-model-optimization is not installed.
    """
    if not isinstance(sparsity, (int, float)) or not 0 < sparsity < 1:
        raise OptionError(
            "sparsity must be a share between 0 and 1",
            received=sparsity,
            mend="Choose for example 0.5",
        )
    how = {"global_batch_size": global_batch_size, "seed": seed}
    tfmot, copy, scale, feed = tuning.begun(model, data, epochs, **how)
    sparse = tfmot.sparsity.keras
    last = max(2, int(epochs * feed.steps_per_epoch * _RAMP))
    schedule = sparse.PolynomialDecay(
        initial_sparsity=0.0,
        final_sparsity=sparsity,
        begin_step=0,
        end_step=last,
        frequency=max(1, last // 20),
    )
    pruned = tuning.wrapped(copy, lambda layer: sparse.prune_low_magnitude(layer, schedule))
    tuning.fit(pruned, model, feed, epochs, [sparse.UpdatePruningStep()])
    result = sparse.strip_pruning(pruned)
    tuning.compile_like(result, model)
    note = "zeros take as many bytes as other weights; the compressed file is what shrinks"
    return result, scale.compare(f"pruned to {sparsity:.0%} zeros", model, result, note)
