"""Clustering: the weights of a layer share a few values.

Deep compression, Han et al. 2015, arXiv:1510.00149, section 3.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tfdist.errors import OptionError
from tfdist.export.smaller import tuning
from tfdist.export.smaller.measuring import Comparison

if TYPE_CHECKING:
    import tensorflow as tf

_AVERAGE = "GradientAggregation.AVG"  # tfmot does not export the class.


def cluster(
    model: tf.keras.Model,
    data: Any,
    *,
    clusters: int = 16,
    epochs: int = 2,
    global_batch_size: int = 64,
    seed: int = 0,
) -> tuple[tf.keras.Model, Comparison]:
    """Lets the weights of each dense and convolutional kernel share ``clusters`` values.

    The file stays as large; what shrinks is the file compressed, as it is inside of an app that is
    downloaded. The given model is left as it is.

    Args:
        clusters: values of a kernel, at least 2. Kernels of so many weights stay as they are.
        model, data, epochs, global_batch_size, seed: as in ``prune``.

    Returns:
        An ordinary compiled Keras model, and size and quality before and after.

    Raises:
        ModelError, EngineMissingError: as ``prune``. OptionError: fewer than 2 clusters.
    """
    if type(clusters) is not int or clusters < 2:
        raise OptionError(
            "clusters must be a whole number of at least 2",
            received=clusters,
            mend="Choose for example 16",
        )
    how = {"global_batch_size": global_batch_size, "seed": seed}
    tfmot, copy, scale, feed = tuning.begun(model, data, epochs, **how)
    keras = tfmot.clustering.keras

    def clustered(layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
        if math.prod(layer.kernel.shape) <= clusters:
            return layer  # It has no more values as it is.
        return keras.cluster_weights(
            layer,
            number_of_clusters=clusters,
            cluster_centroids_init=keras.CentroidInitialization.KMEANS_PLUS_PLUS,
            # The sum of the gradients of thousands of weights that share a value is too long a
            # step at the learning rate that the model was trained with.
            cluster_gradient_aggregation=_AVERAGE,
        )

    trained = tuning.wrapped(copy, clustered)
    tuning.fit(trained, model, feed, epochs)
    result = keras.strip_clustering(trained)
    tuning.compile_like(result, model)
    note = "shared values take as many bytes as others; the compressed file is what shrinks"
    return result, scale.compare(f"{clusters} values in each kernel", model, result, note)
