"""Optimizers: their rates, their variables, and how they apply gradients."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat import is_keras
from tfdist.errors import ModelError
from tfdist.keras.layers import layers_in
from tfdist.keras.tensors import all_raw, raw
from tfdist.keras.version import IS_KERAS_3

#: The methods that apply gradients: the first calls the last, where they are two.
APPLIES = ("apply_gradients", "apply") if IS_KERAS_3 else ("apply_gradients",)
#: Whether a checkpoint gives values to those slots alone that are there when it is read.
SLOTS_COME_FIRST = IS_KERAS_3
#: What a compiled model may have for an optimizer.
KINDS = (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer)
#: Whether equal look-ups of a table are added up before its update.
ADDS_UP_LOOK_UPS = not IS_KERAS_3
#: Callbacks of Keras 3 that exchange weights and their averages -> what says where these are.
EXCHANGES = (
    {tf.keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",)}
    if IS_KERAS_3 and hasattr(tf.keras.callbacks, "SwapEMAWeights")
    else {}
)

# Whether a thread looks for what there is, and writes or reads none of it.
_walk = threading.local()


def inner_of(optimizer: Any) -> Any:
    """Returns the optimizer that one with a loss scale wraps, itself without."""
    return getattr(optimizer, "inner_optimizer", optimizer)


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


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes the slots for ``variables``; legacy optimizers make theirs in the first step.

    In Keras 3 a loss scale would get variables once more.
    """
    is_built = IS_KERAS_3 and optimizer.built
    if hasattr(optimizer, "build") and not is_built:
        optimizer.build(variables)


def has_values(optimizer: Any) -> bool:
    """Whether slots of ``optimizer`` have values, or get those of a checkpoint when it is built.

    Not for legacy ones.
    """
    awaited = getattr(optimizer, "_deferred_dependencies", True)
    is_built = optimizer.built if IS_KERAS_3 else getattr(optimizer, "_built", False)
    return is_built or bool(awaited)


def before_checkpoints(optimizer: Any, check: Callable[[], None]) -> None:
    """Has what writes or reads a checkpoint of ``optimizer`` call ``check`` first.

    So does whatever holds the optimizer, a tf.train.Checkpoint as well as Keras' own files.
    """
    children = optimizer._trackable_children

    def checked(save_type: str = "checkpoint", **options: Any) -> Any:
        if save_type == "checkpoint" and getattr(_walk, "is_for_files", True):
            check()
        return children(save_type, **options)

    optimizer._trackable_children = checked


def descendants_of(owner: Any) -> list[Any]:
    """Returns all that a checkpoint of ``owner`` would hold, without being one."""
    _walk.is_for_files = False
    try:
        return tf.train.TrackableView(owner).descendants()
    finally:
        del _walk.is_for_files


def optimizers_of(model: tf.keras.Model) -> list[Any]:
    """Returns the optimizers of ``model``, in its attributes too, in an order of their own.

    One that another wraps for its loss scale is not called by itself, and is none of them.
    """
    optimizers = [item for item in descendants_of(model) if isinstance(item, KINDS)]
    if isinstance(model.optimizer, KINDS) and model.optimizer not in optimizers:
        optimizers.append(model.optimizer)
    wrapped = [inner for one in optimizers if (inner := inner_of(one)) is not one]
    return [one for one in optimizers if not any(one is inner for inner in wrapped)]


def beside_model(model: tf.keras.Model) -> dict[str, Any]:
    """Returns by names in a checkpoint what ``tensors.saved(model)`` lacks in Keras 3: optimizers
    but the compiled one, and variables of TensorFlow that its layers have made.

    Of Keras 2 a checkpoint of the model holds them. An optimizer that has no slots once the step is
    traced is not called by it, as that of a nested model.

    Raises:
        ModelError: in eager execution, where a step is not traced, one has no slots yet.
    """
    others = [one for one in optimizers_of(model) if IS_KERAS_3 and one is not model.optimizer]
    for one in others:
        if not one.built and model.run_eagerly:
            raise ModelError(
                "optimizers of Keras 3 beside the compiled one must have their slots before the "
                "first step, for a checkpoint to hold them",
                received=f"{type(one).__name__} without slots",
                mend="Call its build(weights) where it is made, or compile without run_eagerly",
            )
    found = {f"optimizer_{number}": one for number, one in enumerate(others) if one.built}
    own = unknown_variables(model)
    return found | ({"own": tf.train.Checkpoint(kept=own)} if own else {})


def unknown_variables(model: tf.keras.Model, *, shared: bool = False) -> list[tf.Variable]:
    """Returns the variables of TensorFlow in ``model`` that Keras 3 does not know of.

    Args:
        shared: whether to leave out what each process has for itself: states of generators.
    """
    if not IS_KERAS_3:
        return []
    owners = [model, *model.metrics, *optimizers_of(model)]
    owners += [inner_of(one) for one in optimizers_of(model)]
    known = {id(variable) for owner in owners for variable in all_raw(owner.variables)}
    items = descendants_of(model)
    if shared:
        known |= {id(one.state) for one in items if isinstance(one, tf.random.Generator)}
    return [one for one in items if isinstance(one, tf.Variable) and id(one) not in known]


def unsaved_variables(model: tf.keras.Model) -> list[tf.Variable]:
    """Returns those of ``unknown_variables`` that no file of Keras 3 holds, ``.keras`` or weights.

    A layer with a ``save_own_variables`` of its own is taken to write what it has made.
    """
    found = unknown_variables(model, shared=True)
    if not found:
        return []
    base = tf.keras.layers.Layer.save_own_variables
    write = [one for one in layers_in(model) if type(one).save_own_variables is not base]
    written = {id(value) for one in write for value in descendants_of(one)}
    return [variable for variable in found if id(variable) not in written]


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
    return tape.gradient(loss, variables)


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
    with _as_summed(inner_of(optimizer)):
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


def rate_of_last_step(optimizer: Any) -> Any:
    """Returns the learning rate that the last step was taken with: a number or a tensor."""
    rate = optimizer.learning_rate
    schedule = given_learning_rate(optimizer)
    if IS_KERAS_3 and callable(schedule):  # Keras 3 tells that of the next step.
        return schedule(tf.maximum(tf.convert_to_tensor(optimizer.iterations) - 1, 0))
    # Legacy optimizers give the schedule itself.
    return rate(optimizer.iterations) if callable(rate) else rate


def given_learning_rate(optimizer: Any) -> Any:
    """Returns the learning rate as it was given: a variable or a schedule.

    ``optimizer.learning_rate`` is the current value of a schedule.
    """
    inner = inner_of(optimizer)
    rate = getattr(inner, "_learning_rate", None)
    return inner.learning_rate if rate is None else rate  # Legacy optimizers give what they have.


def rate_variables_of(optimizer: Any) -> list[tf.Variable]:
    """Returns the variable of its learning rate where ``variables_of`` does not have it: tf_keras
    does not count it."""
    rate = given_learning_rate(optimizer)
    return [rate] if isinstance(rate, tf.Variable) else []


def fixed_rates_of(model: tf.keras.Model) -> list[tuple[Any, float]]:
    """Returns the optimizers of ``model`` that have no schedule, each with its learning rate."""
    inner = [inner_of(one) for one in optimizers_of(model)]
    rates = [(one, given_learning_rate(one)) for one in inner]
    return [(one, float(tf.convert_to_tensor(r))) for one, r in rates if not callable(r)]


def put_rates(rates: Sequence[tuple[Any, float]]) -> None:
    """Gives optimizers the learning rates that ``fixed_rates_of`` has returned."""
    for optimizer, rate in rates:
        given = given_learning_rate(optimizer)
        if hasattr(given, "assign"):
            given.assign(rate)  # Keras 3's MultiOptimizer refuses to be given one.
        else:
            optimizer.learning_rate = rate


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


def update_step(optimizer: Any, twin: Any, gradient: Any, variable: tf.Variable) -> None:
    """Has ``twin`` update ``variable`` at the rate that ``optimizer`` has evaluated."""
    if IS_KERAS_3:
        twin.update_step(gradient, variable, optimizer.learning_rate)
    else:
        set_learning_rate(twin, optimizer.learning_rate)
        twin.update_step(gradient, variable)


def add_slots_by(optimizer: Any, add: Callable[..., Any] | None) -> None:
    """Has ``optimizer`` make each of its slots by ``add(make, variable, name)``; None ends it.

    Args:
        add: gets what makes the slot; the one of Keras 3 wraps a variable of TensorFlow.
    """
    if add is None:
        del optimizer.add_variable_from_reference
        return
    given = optimizer.add_variable_from_reference
    parameters = list(inspect.signature(given).parameters)  # Each Keras has its own names.

    def add_slot(*args: Any, **options: Any) -> Any:
        options |= dict(zip(parameters, args, strict=False))
        return add(lambda: given(**options), options[parameters[0]], options[parameters[1]])

    optimizer.add_variable_from_reference = add_slot


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
def finalized_if(ends: Callable[[], bool], optimizer: Any) -> Iterator[None]:
    """Encloses a call of Keras' fit: weights become their averages where a training ``ends``."""
    name = "finalize_variable_values"
    finalize, own = getattr(optimizer, name, None), vars(optimizer).get(name)
    if finalize is None:  # Legacy optimizers have no averages.
        yield
        return
    setattr(optimizer, name, lambda weights: finalize(weights) if ends() else None)
    try:
        yield
    finally:
        delattr(optimizer, name) if own is None else setattr(optimizer, name, own)


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


def set_learning_rate(optimizer: Any, rate: tf.Variable) -> None:
    """Has ``optimizer`` read ``rate``, in place of a schedule as well."""
    optimizer._learning_rate = rate


def evaluate_schedule(optimizer: Any) -> None:
    """Brings ``optimizer.learning_rate`` to the value of its schedule at its present iteration."""
    if not IS_KERAS_3:  # It evaluates it whenever it is read.
        optimizer._compute_current_learning_rate()


def asks_whether_finite(optimizer: Any) -> bool:
    """Whether ``optimizer`` has a loss scale that follows the gradients: in Keras 3 each does."""
    is_wrapper = inner_of(optimizer) is not optimizer
    return is_wrapper if IS_KERAS_3 else getattr(optimizer, "dynamic", False)


def loss_scale_state(optimizer: Any) -> list[tf.Variable]:
    """Returns what a dynamic loss scale consists of; empty without one, and where it is told of in
    ``variables_of``."""
    if IS_KERAS_3 or not asks_whether_finite(optimizer):
        return []
    return [optimizer._loss_scale.current_loss_scale, optimizer._loss_scale.counter]


def key_of(optimizer: Any, variable: tf.Variable) -> str:
    """Returns the text by which ``optimizer`` knows ``variable``."""
    return optimizer._var_key(variable)


def without_decay(optimizer: Any) -> list[str]:
    """Returns the keys of the variables that do not decay: the optimizer's own list, if any."""
    return getattr(optimizer, "_exclude_from_weight_decay", None) or []


def decay_of(optimizer: Any, variable: tf.Variable) -> float | None:
    """Returns what ``optimizer`` takes off ``variable`` in a step, as a part of it and of the rate.

    None where it does not decay.
    """
    decay = getattr(optimizer, "weight_decay", None)
    return decay if decay and optimizer._use_weight_decay(raw(variable)) else None


def unscaled(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Returns what ``gradients_of`` has found without the loss scale, which Keras 2 has undone."""
    scale = getattr(optimizer, "dynamic_scale", getattr(optimizer, "loss_scale_factor", None))
    if not IS_KERAS_3 or scale is None:
        return list(gradients)
    factor = 1 / tf.convert_to_tensor(scale, tf.float32)
    return [
        None if gradient is None else tf.math.scalar_mul(tf.cast(factor, gradient.dtype), gradient)
        for gradient in gradients
    ]


def update_loss_scale(
    optimizer: Any, is_finite: tf.Tensor, own: Callable[[Any], tf.Variable]
) -> None:
    """Counts a step in the dynamic loss scale of ``optimizer``; on each replica.

    Args:
        is_finite: whether the gradients of all replicas are, bool [].
        own: returns that of a variable which this replica has.
    """
    if IS_KERAS_3:
        scale, count = own(optimizer.dynamic_scale), own(optimizer.step_counter)
        grows = count >= optimizer.dynamic_growth_steps - 1
        scale.assign(scale * tf.where(is_finite, tf.where(grows, 2.0, 1.0), 0.5))
        count.assign(tf.where(is_finite & ~grows, count + 1, 0))
        return
    optimizer._loss_scale.update([tf.where(is_finite, 0.0, float("nan"))])


def counts_step(is_finite: tf.Tensor | None) -> Any:
    """Returns how many steps one counts as: Keras 3 leaves out those that its loss scale skips."""
    return tf.cast(is_finite, tf.int64) if IS_KERAS_3 and is_finite is not None else 1


@contextlib.contextmanager
def clipped_to(optimizer: Any, gradients: list[tf.Tensor]) -> Iterator[None]:
    """Has ``optimizer`` take ``gradients`` for what its own clipping would give."""
    keras_clip, optimizer._clip_gradients = optimizer._clip_gradients, lambda _: gradients
    try:
        yield
    finally:
        optimizer._clip_gradients = keras_clip
