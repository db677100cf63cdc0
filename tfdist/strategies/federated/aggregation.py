"""How the server makes one update of the clients': means, robust means, quantization, privacy."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfdist.compat import import_tensorflow_federated
from tfdist.strategies.federated.options import Options

tff = import_tensorflow_federated()

import tensorflow_privacy as tfp  # noqa: E402 (TFF's import hooks bring it.)

# A smaller tensor gains nothing from quantization.
_QUANTIZED_ABOVE = 64
# Clip at the norm that this share of the updates stay below: TFF's robust_aggregator.
_CLIP_QUANTILE = 0.8


def make_aggregator(options: Options, expected_clients: int) -> Any:
    """Returns the ``tff.aggregators`` factory that the options ask for."""
    aggregators = tff.aggregators
    if options.is_private:
        noise = float(options.dp_noise_multiplier)
        private = PrivateFactory
        if options.dp_clip_norm == "adaptive":
            # TFF's own choice is too little for few clients: part of the noise goes to the counts
            # that the norm adapts by, and it has to be enough for noise_multiplier as a whole.
            count_noise = max(0.05 * expected_clients, noise)
            return private.gaussian_adaptive(
                noise, float(expected_clients), clipped_count_stddev=float(count_noise)
            )
        return private.gaussian_fixed(noise, float(expected_clients), float(options.dp_clip_norm))
    if options.aggregation in ("median", "trimmed_mean"):
        share = 0.5 if options.aggregation == "median" else options.trim_fraction
        return TrimmedMeanFactory(share)
    if options.secure_aggregation:
        return tff.learning.secure_aggregator(
            zeroing=False, clipping=options.aggregation == "clipped_mean"
        )
    total = None
    if options.quantize_bits is not None:
        total = aggregators.EncodedSumFactory.quantize_above_threshold(
            quantization_bits=options.quantize_bits, threshold=_QUANTIZED_ABOVE
        )
    mean = aggregators.MeanFactory(total)
    if options.aggregation == "mean":
        return mean
    norm = aggregators.PrivateQuantileEstimationProcess.no_noise(
        initial_estimate=1.0, target_quantile=_CLIP_QUANTILE, learning_rate=0.2
    )
    return aggregators.clipping_factory(norm, mean)


def update_bytes(variables: list[tf.Variable], options: Options) -> int:
    """Returns what the update of one client takes on the wire, in bytes."""
    return sum(_encoded_bytes(variable, options.quantize_bits) for variable in variables)


def _encoded_bytes(variable: tf.Variable, bits: int | None) -> int:
    size = math.prod(variable.shape)
    if bits is None or size <= _QUANTIZED_ABOVE:
        return size * variable.dtype.size
    from tensorflow_model_optimization.python.core.internal import tensor_encoding as te

    spec = tf.TensorSpec(variable.shape, variable.dtype)
    encoder = te.encoders.as_gather_encoder(te.encoders.uniform_quantization(bits), spec)
    with tf.Graph().as_default():
        parameters, _, _ = encoder.get_params(encoder.initial_state())
        encoded = encoder.encode(tf.zeros(spec.shape, spec.dtype), parameters)[0]
        leaves = [leaf for leaf in tf.nest.flatten(encoded) if isinstance(leaf, tf.Tensor)]
    return sum(math.prod(leaf.shape) * leaf.dtype.size for leaf in leaves)


class PrivateFactory(tff.aggregators.DifferentiallyPrivateFactory):
    """TFF's differential privacy over groups of clients: each client is clipped in its group.

    Args:
        query: of TensorFlow Privacy, which the class methods make.
    """

    def __init__(self, query: Any):
        self._of_each = query
        self._params = query.derive_sample_params(query.initial_global_state())
        super().__init__(_OfClipped(query))

    @property
    def num_clipping(self) -> int:
        """Numbers by which a client clips its update."""
        return len(tf.nest.flatten(self._params))

    def clipping(self, state: Any) -> list[float]:
        """Returns these numbers; ``state``: of the aggregator, before the round."""
        params = self._of_each.derive_sample_params(state.query_state)
        return [float(number) for number in tf.nest.flatten(params)]

    def clipped(self, clipping: list[tf.Tensor], update: list[tf.Tensor]) -> Any:
        """Returns what the server sums up of a client's update."""
        params = tf.nest.pack_sequence_as(self._params, clipping)
        return self._of_each.preprocess_record(params, update)


class _OfClipped(tfp.SumAggregationDPQuery):
    """A query of sums of records that are clipped already."""

    def __init__(self, query: Any):
        self._query = query

    def initial_global_state(self) -> Any:
        return self._query.initial_global_state()

    def derive_sample_params(self, global_state: Any) -> Any:
        return self._query.derive_sample_params(global_state)

    def preprocess_record(self, params: Any, record: Any) -> Any:
        return record

    def get_noised_result(self, sample_state: Any, global_state: Any) -> Any:
        return self._query.get_noised_result(sample_state, global_state)

    def derive_metrics(self, global_state: Any) -> Any:
        return self._query.derive_metrics(global_state)


class TrimmedMeanFactory(tff.aggregators.WeightedAggregationFactory):
    """Averages each coordinate without its largest and smallest values, all clients alike.

    Those of weight 0 are left out.

    Yin et al. 2018, arXiv:1803.01498. Trimming half on either side leaves the median.

    Args:
        trim_fraction: share of the clients that is cut off on either side, 0.0 to 0.5.
    """

    def __init__(self, trim_fraction: float):
        self._trim_fraction = trim_fraction

    def create(self, value_type: Any, weight_type: Any) -> Any:
        specs = tff.types.structure_from_tensor_type_tree(
            lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), value_type
        )
        flat = tf.nest.flatten(specs)

        @tff.tensorflow.computation
        def none_yet() -> list[tf.Tensor]:
            return [_open(tf.zeros([0, *spec.shape], spec.dtype)) for spec in flat]

        rows_type = tff.to_type(
            [tff.TensorType(spec.dtype.as_numpy_dtype, [None, *spec.shape]) for spec in flat]
        )

        @tff.tensorflow.computation(rows_type, tff.to_type((value_type, weight_type)))
        def add(rows: Any, weighed: Any) -> list[tf.Tensor]:
            value, weight = weighed
            count = tf.cast(weight > 0, tf.int32)
            leaves = tf.nest.flatten(value)
            return [tf.concat([a, b[None][:count]], 0) for a, b in zip(rows, leaves, strict=True)]

        @tff.tensorflow.computation(rows_type, rows_type)
        def merge(rows: Any, others: Any) -> list[tf.Tensor]:
            return [tf.concat([a, b], 0) for a, b in zip(rows, others, strict=True)]

        @tff.tensorflow.computation(rows_type)
        def report(rows: Any) -> Any:
            means = [trimmed_mean(leaf, self._trim_fraction) for leaf in rows]
            return tf.nest.pack_sequence_as(specs, means)

        @tff.federated_computation
        def initialize() -> Any:
            return tff.federated_value((), tff.SERVER)

        @tff.federated_computation(
            tff.FederatedType((), tff.SERVER),
            tff.FederatedType(value_type, tff.CLIENTS),
            tff.FederatedType(weight_type, tff.CLIENTS),
        )
        def advance(state: Any, value: Any, weight: Any) -> Any:
            weighed = tff.federated_zip((value, weight))
            result = tff.federated_aggregate(weighed, none_yet(), add, merge, report)
            nothing = tff.federated_value((), tff.SERVER)
            return tff.templates.MeasuredProcessOutput(state, result, nothing)

        return tff.templates.AggregationProcess(initialize, advance)


def trimmed_mean(rows: tf.Tensor, trim_fraction: float) -> tf.Tensor:
    """Returns the mean over clients without the extremes; rows: float [clients, ...]."""
    count = tf.shape(rows)[0]
    # At least one value is left, two where their number is even: the median.
    cut = tf.minimum(
        tf.cast(tf.floor(tf.cast(count, tf.float32) * trim_fraction), tf.int32), (count - 1) // 2
    )
    ordered = tf.sort(rows, axis=0)
    return tf.reduce_mean(ordered[cut : count - cut], axis=0)


def _open(rows: tf.Tensor) -> tf.Tensor:
    """Hides the number of rows, which grows, from the type."""
    return tf.compat.v1.placeholder_with_default(rows, [None, *rows.shape[1:]])
