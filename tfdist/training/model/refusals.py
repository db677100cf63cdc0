"""What several strategies refuse of a model, each in one place and in the same words."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.compat import is_keras
from tfdist.errors import ModelError, OptionError
from tfdist.training.engine.options import StepOptions

_K = tf.keras.optimizers
#: Each element's update depends on that element alone, so a part of a weight is updated like the
#: whole. Not so Nadam's: see ``refuse_nadam``.
_ELEMENTWISE = (
    _K.SGD, _K.Adam, _K.AdamW, _K.Adamax, _K.Adagrad, _K.Adadelta, _K.RMSprop, _K.Ftrl, _K.Lion,
)  # fmt: skip
#: Their names, for people.
ELEMENTWISE_NAMES = ", ".join(cls.__name__ for cls in _ELEMENTWISE)


_KERASES = {"keras": "Keras 3 (import keras)", "tf_keras": "Keras 2 (import tf_keras)"}


def refuse_other_keras(what: str, *things: Any) -> None:
    """Raises:
    ModelError: one of these things is of that Keras, 2 or 3, which ``tf.keras`` is not here.

    Args:
        what: they are, for people, such as "a callback".
    """
    here = tf.keras.Model.__module__.partition(".")[0]
    for thing in things:
        roots = {kind.__module__.partition(".")[0] for kind in type(thing).__mro__} & {*_KERASES}
        if roots and here not in roots:
            raise ModelError(
                f"{what} must be of tf.keras, which is {_KERASES[here]} here",
                received=f"{type(thing).__name__} of {_KERASES[min(roots)]}",
                mend="Import one of the two in the whole program, by its own name, before "
                "anything uses tf.keras (docs/keras-3.md)",
            )


def is_elementwise(optimizer: Any) -> bool:
    """Whether ``optimizer`` is one of Keras' own that updates each element by itself."""
    base = next((cls for cls in _ELEMENTWISE if isinstance(optimizer, cls)), None)
    return base is not None and type(optimizer).update_step is base.update_step


def refuse_undivided(model: tf.keras.Model, options: StepOptions, *, is_elastic: bool) -> None:
    """Refuses what ``shard``, or ``offload="optimizer"``, cannot divide.

    Raises:
        ModelError: the optimizer is not known to update each element of a weight by itself, or the
            weights have fewer elements than there are replicas.
        OptionError: replicas may be lost, and their slots with them.
    """
    option = options.dividing_option
    if is_elastic:
        raise OptionError(
            "the slots of an elastic job must be whole on each rank, which may be lost",
            received=f"{option} with min_workers",
            mend="Leave it out, or min_workers and use --max-restarts",
        )
    optimizer = keras.optimizers.inner_of(model.optimizer)
    kind = type(optimizer)
    if kind not in _ELEMENTWISE:
        is_legacy = kind is getattr(_K.legacy, kind.__name__, None)
        raise ModelError(
            f"an optimizer whose slots are divided ({option}) must update each element of "
            "a weight by itself, unlike one that works on whole layers (LAMB, Adafactor), one that "
            "counts its variables (Nadam), a legacy one, or a class of your own",
            received="tf.keras.optimizers." + ("legacy." if is_legacy else "") + kind.__name__
            if is_keras(kind.__module__)
            else kind.__name__,
            mend=f"Choose one of tf.keras.optimizers: {ELEMENTWISE_NAMES}; or leave out the option",
        )
    if keras.optimizers.asks_whether_to_update(optimizer, [keras.optimizers.WAITS]):
        raise ModelError(
            f"an optimizer of Keras 3 whose slots are divided ({option}) must update in each step",
            received=f"{kind.__name__} with {keras.optimizers.WAITS}",
            mend="Use accumulate_steps of the strategy",
        )
    if options.shards_weights and model.run_eagerly:
        raise ModelError(
            "a model whose weights replicas divide (shard='weights') must take its steps as graphs",
            received=f"model '{model.name}' with run_eagerly=True",
            mend="Compile it without run_eagerly, or use shard='optimizer'",
        )
    if options.shards_weights and optimizer.use_ema:
        raise ModelError(
            "weights that replicas divide (shard='weights') must have no averages, which Keras "
            "puts in their place as a whole",
            received=f"{kind.__name__} with use_ema=True",
            mend="Leave out use_ema, or use shard='optimizer'",
        )


def refuse_own_steps(model: tf.keras.Model, strategy: str) -> None:
    """Raises:
    ModelError: the model's class has a train, test or predict step of its own.
    """
    way = "use strategy 'single', 'mirrored', 'horovod' or 'multi_worker'"
    if strategy == "single":  # Which takes their place for these alone.
        way = "leave out accumulate_steps, recompute and offload"
    if own := keras.layers.written_anew(model, "train_step", "test_step", "predict_step"):
        raise ModelError(
            f"a model of strategy '{strategy}' must have Keras' own {own[0]}, since the "
            "strategy takes its place to make the parts of a batch add up to the whole",
            received=f"{type(model).__name__} with a {own[0]} of its own",
            mend=f"Move the custom part into compute_loss or a loss, or {way}",
        )


def refuse_own_loss(model: tf.keras.Model, strategy: str) -> None:
    """Raises:
    ModelError: the model's class has a compute_loss of its own.
    """
    if keras.layers.written_anew(model, "compute_loss"):
        raise ModelError(
            f"a model of strategy '{strategy}' must have Keras' own compute_loss, since the "
            "strategy computes the compiled loss by itself",
            received=f"{type(model).__name__} with a compute_loss of its own",
            mend="Compile the model with that loss, or use strategy 'single'",
        )


def refuse_own_metrics(model: tf.keras.Model, strategy: str) -> None:
    """Raises:
    ModelError: the model's class has a compute_metrics of its own, and ranks share its batches.
    """
    if keras.layers.written_anew(model, "compute_metrics"):
        raise ModelError(
            f"a model of strategy '{strategy}' with replicas must have Keras' own compute_metrics, "
            "or it would show the metrics of one rank's rows",
            received=f"{type(model).__name__} with a compute_metrics of its own",
            mend="Give metrics to compile(), or leave replicas out",
        )


def refuse_float8(model: tf.keras.Model) -> None:
    """Raises:
    ModelError: layers of ``model`` compute in float8, whose scales are no sum over replicas.
    """
    if names := keras.layers.overwritten_weights(model):
        raise ModelError(
            "layers of a model whose batches are divided must not compute in float8, since their "
            "scales are replaced in each step and would be added up",
            received=f"{len(names)} such weights, {names[0]} among them",
            mend="Use mixed_bfloat16, or strategy 'single' without accumulate_steps",
        )


def refuse_undense_inputs(model: tf.keras.Model, strategy_name: str) -> None:
    """Raises:
    ModelError: an input of ``model`` is sparse or ragged.
    """
    for symbol in model.inputs:
        if kind := keras.graph.undense(symbol):
            raise ModelError(
                f"inputs of a model of strategy '{strategy_name}' must be dense, since their rows "
                "are divided",
                received=f"input '{symbol.name}', {kind}",
                mend="Leave sparse=True or ragged=True out of keras.Input and give dense arrays, "
                "or use strategy 'single'",
            )


def refuse_xla(model: tf.keras.Model) -> None:
    """Raises:
    ModelError: the model is compiled with ``jit_compile=True``.

    As tried with TensorFlow 2.21 on CPUs, a step ends in: "Collectives are not yet implemented for
    CPU devices when compiling with XLA" (multi_worker); "No registered 'HorovodAllreduce' OpKernel
    for XLA_CPU_JIT" (horovod); "Trying to access resource ... located in CPU:1 from CPU:0"
    (mirrored), where the way forward and back is compiled alone, too, unless it takes all weights
    as arguments, which Keras' layers do not.
    """
    keras.steps.resolve_xla(model)
    if model.jit_compile:
        raise ModelError(
            "a model whose step several devices or processes share must be compiled without XLA, "
            "since TensorFlow lets replicas meet in no function that XLA compiles",
            received=f"model '{model.name}' with jit_compile=True",
            mend="Compile it without jit_compile (functions that its layers call may be "
            "tf.function(jit_compile=True)), or use strategy 'single'",
        )


def refuse_eager(model: tf.keras.Model, strategy: str) -> None:
    """Raises:
    ModelError: the model is compiled with ``run_eagerly=True``.
    """
    if model.run_eagerly:
        raise ModelError(
            f"a model of strategy '{strategy}' must take its steps as graphs",
            received=f"model '{model.name}' with run_eagerly=True",
            mend="Compile it without run_eagerly, or use strategy 'single' to look into a step",
        )


def refuse_nadam(optimizer: Any, strategy: str) -> None:
    """Raises:
    ModelError: the optimizer is the Nadam of Keras 2 (``Nadam.update_step``).
    """
    if keras.optimizers.counts_variables(keras.optimizers.inner_of(optimizer)):
        raise ModelError(
            f"an optimizer of strategy '{strategy}' must not tell by a count of traced variables "
            "when a step begins, as Keras' Nadam does",
            received="the optimizer Nadam",
            mend="Choose Adam or AdamW",
        )


def refuse_late_slots(model: tf.keras.Model) -> None:
    """Raises:
    ModelError: the optimizer makes variables in its first step; an elastic fit must know them.
    """
    if isinstance(model.optimizer, tf.keras.optimizers.legacy.Optimizer):
        name = type(model.optimizer).__name__
        raise ModelError(
            "the optimizer of an elastic job must be able to make its variables before the first "
            "step",
            received=f"the legacy optimizer {name}",
            mend=f"Compile with tf.keras.optimizers.{name}",
        )


def refuse_steps_within_steps(model: tf.keras.Model) -> None:
    """Raises:
    ModelError: the optimizer (of Keras 3) asks in a step whether to update; tf.distribute's
        replicas cannot meet within the answer.
    """
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return
    for optimizer in keras.optimizers.parts_of(model.optimizer):
        found = keras.optimizers.asks_whether_to_update(optimizer)
        if found is not None:
            raise ModelError(
                "the optimizer of several replicas must update in each step",
                received=f"{found}={getattr(optimizer, found)}",
                mend="Leave it out (accumulate_steps of the strategy accumulates gradients), or "
                "use strategy 'horovod'",
            )
