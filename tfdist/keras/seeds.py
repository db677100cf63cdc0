"""What the random numbers of layers are drawn from."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.compat import keras_source
from tfdist.keras import step_context
from tfdist.keras.layers import Replacement, layers_in
from tfdist.keras.version import IS_KERAS_3

#: Whether layers keep what their random numbers are drawn from, and checkpoints do.
ARE_KEPT = IS_KERAS_3
# What ``keras.random`` draws from where it is given no seed.
_SHARED = "global_seed_generator"


def random_generator(layer: tf.keras.layers.Layer) -> Any | None:
    """Returns the object that all random numbers of ``layer`` come from, None without one."""
    return getattr(layer, "_random_generator", None)


def seeds_in(model: tf.keras.Model) -> list[tf.Variable]:
    """Returns what the random numbers of layers are drawn from, and counts them, in Keras 3."""
    return [generator.state.value for generator in _generators_in(model)]


def shared_seed() -> tf.Variable | None:
    """Returns what ``keras.random`` draws from where it is given no seed; None before it does."""
    if not IS_KERAS_3:
        return None
    state = keras_source("backend.common.global_state")
    generator = state.get_global_attribute(_SHARED)
    return None if generator is None else generator.state.value


def has_seed(layer: Any) -> bool:
    """Whether all random numbers of ``layer`` come from what it keeps itself: see ``drawing_by``.

    In Keras 2 it is ``random_generator``.
    """
    return bool(getattr(layer, "_seed_generators", None))


def draws_by_step(model: tf.keras.Model) -> list[Replacement]:
    """Has the layers of ``model`` draw the random numbers that a step tells them to draw."""
    return [
        (generator, {"next": _by_step(generator.next, generator.state.value)})
        for generator in _generators_in(model)
        if "next" not in vars(generator)
    ]


def _generators_in(model: tf.keras.Model) -> list[Any]:
    if not IS_KERAS_3:
        return []
    return [generator for layer in layers_in(model) for generator in layer._seed_generators]


def _by_step(given: Callable[..., tf.Tensor], state: tf.Variable) -> Callable[..., tf.Tensor]:
    def next_seed(*args: Any, **options: Any) -> tf.Tensor:
        seeds, draw = step_context.current().seeds, functools.partial(given, *args, **options)
        draw.state = state
        return draw() if seeds is None else seeds(draw)

    return next_seed


@contextlib.contextmanager
def unshared_seed() -> Iterator[None]:
    """Has the seed that layers without one share be as it was: one made meanwhile is forgotten."""
    if not IS_KERAS_3:
        yield
        return
    state = keras_source("backend.common.global_state")
    before = state.get_global_attribute(_SHARED)
    try:
        yield
    finally:
        state.set_global_attribute(_SHARED, before)


def drawing_on(replica: Callable[[], Any]) -> contextlib.AbstractContextManager:
    """Returns what encloses a forward pass that draws other random numbers on each replica.

    The first draws what one device does. In Keras 3 the seeds are variables, which are the same on
    all replicas.
    """

    def seed_of(draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        seed = draw()
        number = tf.cast(replica(), seed.dtype)
        return seed + tf.stack([number, tf.zeros_like(number)])

    return step_context.within(seeds=seed_of)


def drawing_by(seed: tf.Tensor) -> contextlib.AbstractContextManager:
    """Returns what encloses a forward pass whose random numbers follow from ``seed``, int32 [2],
    and from what layers keep, which stays as it is: the same pass draws the same once more."""
    fold_in = tf.random.experimental.stateless_fold_in
    turns: collections.Counter[int] = collections.Counter()

    def seed_of(draw: Any) -> tf.Tensor:
        state, turn = tf.convert_to_tensor(draw.state), turns[id(draw.state)]
        turns[id(draw.state)] += 1
        folded = seed
        for number in (*tf.unstack(tf.cast(state, tf.int32)), turn):
            folded = fold_in(folded, number)
        return tf.cast(folded, state.dtype)

    return step_context.within(seeds=seed_of)


def keeping_seeds(kept: list[tf.Tensor]) -> contextlib.AbstractContextManager:
    """Returns what encloses a forward pass whose seeds are ``kept``, to be drawn once more."""
    given = step_context.current().seeds

    def seed_of(draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        kept.append(draw() if given is None else given(draw))
        return kept[-1]

    return step_context.within(seeds=seed_of)
