"""Optimizers: their rates, their variables, and how they apply gradients."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat import is_keras
from tfdist.keras.layers import replaced
from tfdist.keras.tensors import all_raw, raw
from tfdist.keras.version import IS_KERAS_3

#: The methods that apply gradients: the first calls the last, where they are two.
APPLIES = ("apply_gradients", "apply") if IS_KERAS_3 else ("apply_gradients",)
#: What a compiled model may have for an optimizer.
KINDS = (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer)
#: Whether equal look-ups of a table are added up before its update.
ADDS_UP_LOOK_UPS = not IS_KERAS_3
# Keras 3's, which updates each weight by one of several optimizers.
_SEVERAL = getattr(tf.keras.optimizers, "MultiOptimizer", ())


def has_parts(optimizer: Any) -> bool:
    """Whether it is several, Keras 3's MultiOptimizer: with rates of their own, and known late."""
    return isinstance(inner_of(optimizer), _SEVERAL)


def parts_of(optimizer: Any) -> list[Any]:
    """Returns those that update weights: the ones of Keras 3's MultiOptimizer, else itself."""
    inner = inner_of(optimizer)
    return list(inner.optimizers) if has_parts(optimizer) else [inner]


def inner_of(optimizer: Any) -> Any:
    """Returns the optimizer that one with a loss scale wraps, itself without."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def steps_of(optimizer: Any) -> tf.Variable:
    """Returns how many steps ``optimizer`` has seen: Keras 3 tells of those that it has applied."""
    return inner_of(optimizer)._iterations if IS_KERAS_3 else optimizer.iterations


def compiling(model: tf.keras.Model) -> contextlib.AbstractContextManager:
    """Returns what encloses a compilation: Keras 3 does not enter the scope of ``model`` itself."""
    return model.distribute_strategy.scope() if IS_KERAS_3 else contextlib.nullcontext()


def is_of_another_scope(optimizer: Any, model: tf.keras.Model) -> bool:
    """Whether ``optimizer`` has variables for other replicas than those of ``model``.

    An optimizer of Keras 3 has variables from the beginning, and keeps the strategy of then.
    """
    return IS_KERAS_3 and inner_of(optimizer)._distribution_strategy != model.distribute_strategy


def variables_of(optimizer: Any) -> list[tf.Variable]:
    """Returns the variables of ``optimizer``, that of a loss scale of Keras 3 included."""
    variables = optimizer.variables
    return all_raw(variables() if callable(variables) else variables)


def state_of(optimizer: Any) -> dict[str, list[tf.Variable]]:
    """Returns the counters of ``optimizer``, and its slots in the order of the weights, by names.

    Its rate is none of them.
    """
    others = ("_variables", "_trainable_variables", "_learning_rate", "_current_learning_rate")
    found: dict[str, list[tf.Variable]] = {}
    for name, value in vars(optimizer).items():
        each = all_raw(value if isinstance(value, list) else [value])
        kept = [one for one in each if isinstance(one, tf.Variable)]
        if kept and name not in others:
            found[name] = kept
    if IS_KERAS_3:  # Slots of a user's own class may be kept otherwise.
        rate = raw(optimizer._learning_rate)
        known = {id(rate), *(id(one) for kept in found.values() for one in kept)}
        found["others"] = [one for one in variables_of(optimizer) if id(one) not in known]
    return found


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes the slots for ``variables``; legacy optimizers make theirs in the first step.

    In Keras 3 a loss scale would get variables once more.
    """
    is_built = IS_KERAS_3 and optimizer.built
    if hasattr(optimizer, "build") and not is_built:
        optimizer.build(variables)


def build_around(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes what a loss scale of Keras 3 has for itself; the optimizer within is built."""
    inner = inner_of(optimizer)
    if IS_KERAS_3 and inner is not optimizer:
        with replaced(inner, build=lambda _: None):
            optimizer.build(variables)


def has_values(optimizer: Any) -> bool:
    """Whether slots of ``optimizer`` have values, or get those of a checkpoint when it is built.

    Not for legacy ones.
    """
    awaited = getattr(optimizer, "_deferred_dependencies", True)
    is_built = optimizer.built if IS_KERAS_3 else getattr(optimizer, "_built", False)
    return is_built or bool(awaited)


def gradients_of(
    optimizer: Any, loss: tf.Tensor, variables: Sequence[Any], tape: tf.GradientTape
) -> list[Any]:
    """Returns the gradients that ``optimizer`` applies: Keras 3 scales them until it does."""
    if IS_KERAS_3:
        with tape:
            loss = optimizer.scale_loss(loss)
        return tape.gradient(loss, variables)
    if hasattr(optimizer, "compute_gradients"):  # It also undoes a loss scale.
        return [g for g, _ in optimizer.compute_gradients(loss, variables, tape)]
    if hasattr(optimizer, "get_scaled_loss"):  # A legacy one, which has no public name for both.
        with tape:
            loss = optimizer.get_scaled_loss(loss)
        return optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
    return tape.gradient(loss, variables)


def loss_factor(optimizer: Any) -> tf.Tensor | None:
    """Returns what ``optimizer`` multiplies a loss by, so that float16 gradients do not vanish.

    None where it is 1.
    """
    if IS_KERAS_3:
        scales = inner_of(optimizer) is not optimizer or optimizer.loss_scale_factor is not None
        return optimizer.scale_loss(tf.ones([])) if scales else None
    scales = hasattr(optimizer, "get_scaled_loss")
    return optimizer.get_scaled_loss(tf.ones([])) if scales else None


def without_factor(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Returns gradients as ``optimizer`` applies them: Keras 3 itself undoes ``loss_factor``."""
    if hasattr(optimizer, "get_unscaled_gradients"):
        return optimizer.get_unscaled_gradients(gradients)
    return gradients


def apply_sum(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Adds up ``gradients`` over the replicas of tf.distribute, and applies the sums; on each.

    Keras 3 clips the gradients of each replica, and asks one of them whether they are finite,
    before it adds them up. So here they come to it as sums; and to an ``apply_gradients`` of the
    user's own, which may change them.
    """
    if not IS_KERAS_3 and is_keras(type(optimizer).apply_gradients.__module__):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return
    known = [gradient for gradient in gradients if gradient is not None]
    sums = iter(tf.distribute.get_replica_context().all_reduce("SUM", known))
    summed = [None if gradient is None else next(sums) for gradient in gradients]
    with contextlib.ExitStack() as summed_already:
        for part in parts_of(optimizer):
            summed_already.enter_context(_as_summed(part))
        optimizer.apply_gradients(zip(summed, variables, strict=True))


@contextlib.contextmanager
def _as_summed(optimizer: Any) -> Iterator[None]:
    """Has ``optimizer`` take gradients for sums over replicas.

    Replicas are in here at the same time, each in a thread of its own, and Keras starts others: so
    they are counted, and not known by their threads.
    """
    name = "_all_reduce_sum_gradients"
    if not IS_KERAS_3:
        is_legacy = isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer)
        name = "_aggregate_gradients" if is_legacy else "aggregate_gradients"
    if not isinstance(getattr(optimizer, name), _Reduction):
        setattr(optimizer, name, _Reduction(getattr(optimizer, name)))
    reduction = getattr(optimizer, name)
    reduction.num_summed += 1
    try:
        yield
    finally:
        reduction.num_summed -= 1


class _Reduction:
    """Keras' sum over replicas, but for gradients that are summed already."""

    def __init__(self, of_keras: Callable[[Any], Any]):
        self._of_keras = of_keras
        self.num_summed = 0

    def __call__(self, pairs: Any) -> Any:
        return pairs if self.num_summed else self._of_keras(pairs)


def given_to(optimizer: Any, args: tuple, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Returns the gradients and variables of a call of the last method of ``APPLIES``."""
    if not IS_KERAS_3:
        given = args[0] if args else options["grads_and_vars"]
        gradients, variables = zip(*given, strict=True)
        return list(gradients), list(variables)
    gradients = args[0] if args else options["grads"]
    variables = args[1] if len(args) > 1 else options.get("trainable_variables")
    return list(gradients), list(optimizer._trainable_variables if variables is None else variables)


def applied(optimizer: Any, args: tuple, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Does as ``given_to``, and makes slots outside of the step, as those of Keras 2 are."""
    gradients, variables = given_to(optimizer, args, options)
    if IS_KERAS_3:
        with tf.init_scope():
            build(optimizer, variables)
    return gradients, variables


def twin_of(optimizer: Any, config: dict[str, Any]) -> Any:
    """Returns an optimizer of the same kind and of ``config``, that counts the same iterations."""
    twin = type(optimizer).from_config(config | {"learning_rate": 0.0})
    if IS_KERAS_3:
        twin._iterations = optimizer._iterations
    else:
        twin.iterations = optimizer.iterations
    return twin


def take_settings(twin: Any, optimizer: Any) -> None:
    """Gives ``twin`` the present settings of ``optimizer``, as its momentum; not while tracing."""
    for name in vars(twin).keys() & optimizer.get_config().keys() - {"name", "jit_compile"}:
        setattr(twin, name, getattr(optimizer, name))


def set_learning_rate(optimizer: Any, rate: tf.Variable) -> None:
    """Has ``optimizer`` read ``rate``, in place of a schedule as well."""
    optimizer._learning_rate = rate


def update_step(optimizer: Any, twin: Any, gradient: Any, variable: tf.Variable) -> None:
    """Has ``twin`` update ``variable`` at the rate that ``optimizer`` has evaluated."""
    if IS_KERAS_3:
        twin.update_step(gradient, variable, optimizer.learning_rate)
    else:
        set_learning_rate(twin, optimizer.learning_rate)
        twin.update_step(gradient, variable)


def slots_added_by(
    optimizer: Any, add: Callable[..., Any]
) -> contextlib.AbstractContextManager[None]:
    """Has ``optimizer`` make each of its slots by ``add(make, variable, name)``.

    Args:
        add: gets what makes the slot; the one of Keras 3 wraps a variable of TensorFlow.
    """
    given = optimizer.add_variable_from_reference
    parameters = list(inspect.signature(given).parameters)  # Each Keras has its own names.

    def add_slot(*args: Any, **options: Any) -> Any:
        options |= dict(zip(parameters, args, strict=False))
        return add(lambda: given(**options), options[parameters[0]], options[parameters[1]])

    return replaced(optimizer, add_variable_from_reference=add_slot)


def moved_average(optimizer: Any, average: tf.Variable, variable: tf.Variable) -> tf.Tensor:
    """Returns the next average of a weight; that of Keras 3 begins with the first step."""
    momentum = optimizer.ema_momentum
    if IS_KERAS_3:
        is_first = tf.convert_to_tensor(optimizer.iterations) == 0
        momentum = tf.cast(tf.where(is_first, 0.0, momentum), variable.dtype)
    return momentum * average + (1 - momentum) * variable


def finalize(model: tf.keras.Model) -> None:
    """Gives the weights of ``model`` what the end of Keras' fit does: their averages, if any."""
    if hasattr(model.optimizer, "finalize_variable_values"):
        model.optimizer.finalize_variable_values(model.trainable_variables)


@contextlib.contextmanager
def ended_by(ends: Callable[[], bool], optimizer: Any, end: Callable[[], None]) -> Iterator[None]:
    """Encloses a call of Keras' fit: weights become their averages where a training ``ends``.

    Args:
        end: called before they do.
    """
    finalize = getattr(optimizer, "finalize_variable_values", None)
    if finalize is None:  # Legacy optimizers have no averages.
        yield
        return

    def finalize_if(weights: Any) -> None:
        if ends():
            end()
            finalize(weights)

    with replaced(optimizer, finalize_variable_values=finalize_if):
        yield


#: What has an optimizer of Keras 3 update in some steps alone.
WAITS = "gradient_accumulation_steps"


def asks_whether_to_update(
    optimizer: Any, names: Sequence[str] = (WAITS, "ema_overwrite_frequency")
) -> str | None:
    """Returns what has an optimizer of Keras 3 ask in a step whether to update; None: nothing."""
    return next((name for name in names if IS_KERAS_3 and getattr(optimizer, name, None)), None)


def counts_variables(optimizer: Any) -> bool:
    """Whether it tells by a count of traced variables when a step begins, as Keras 2's Nadam."""
    return not IS_KERAS_3 and isinstance(optimizer, tf.keras.optimizers.Nadam)


def squares_look_ups(optimizer: Any) -> bool:
    """Whether ``optimizer`` takes gradients of equal look-ups for other ones than their sum.

    That of Keras 3 does, which hands them to its update as they are; only SGD adds them up.
    """
    return IS_KERAS_3 and not isinstance(optimizer, tf.keras.optimizers.SGD)


def key_of(optimizer: Any, variable: tf.Variable) -> str:
    """Returns the text by which ``optimizer`` knows ``variable``."""
    return optimizer._var_key(variable)


def without_decay(optimizer: Any) -> list[str]:
    """Returns the keys of the variables that do not decay: the optimizer's own list, if any."""
    return getattr(optimizer, "_exclude_from_weight_decay", None) or []


def leave_out_of_decay(optimizer: Any, keys: Sequence[str]) -> None:
    """Adds keys of variables to the optimizer's own list of those that do not decay."""
    if keys:
        kept = optimizer._exclude_from_weight_decay
        optimizer._exclude_from_weight_decay = type(kept)([*kept, *keys])


def decay_of(optimizer: Any, variable: tf.Variable) -> float | None:
    """Returns what ``optimizer`` takes off ``variable`` in a step, as a part of it and of the rate.

    None where it does not decay.
    """
    decay = getattr(optimizer, "weight_decay", None)
    return decay if decay and optimizer._use_weight_decay(raw(variable)) else None


def clipped_to(
    optimizer: Any, gradients: list[tf.Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Has ``optimizer`` take ``gradients`` for what its own clipping would give."""
    return replaced(optimizer, _clip_gradients=lambda _: gradients)
