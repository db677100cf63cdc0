"""Dropout and noise whose numbers depend on step, microbatch and layer, and on nothing else.

A forward pass that is computed once more then draws the same ones, and so does a fit that is
resumed at a step, in a process whose ``keras.utils.set_random_seed`` was the same.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import is_keras
from tfdist.errors import ModelError, OptionError, first_line
from tfdist.keras import step_context
from tfdist.keras.graph import layer_of_scope
from tfdist.keras.layers import layers_in, written_anew
from tfdist.keras.optimizers import steps_of
from tfdist.keras.seeds import ARE_KEPT, drawing_by, has_seed, random_generator, shared_seed
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.failure_notices import ToldOnce

# Operations whose results are others each time they run.
_UNSEEDED = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGammaV2",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "RngReadAndSkip",
    "StatefulStandardNormalV2",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "StatefulUniformInt",
    "TruncatedNormal",
)
_L = tf.keras.layers
_NOISE = (
    _L.Dropout, _L.AlphaDropout, _L.GaussianDropout, _L.GaussianNoise,
    _L.SpatialDropout1D, _L.SpatialDropout2D, _L.SpatialDropout3D,
)  # fmt: skip
# How TensorFlow says that a replica has made a variable while a step was traced.
_MADE_LATE = "only supports singleton tf.Variables"
# Between the seeds of two processes: TensorFlow adds the numbers of operations to them.
_APART = 2**20
#: Graphs whose seed is this process's own already.
_seeded_apart: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
# How layers that augment call what they change an image by; the others always change it.
_AMOUNTS = ("factor", "height_factor", "width_factor")
# How layers with a Dropout inside call its rate: recurrent ones, and attention.
_RATES = ("dropout", "recurrent_dropout", "_dropout")


class _Draws:
    """The random numbers that layers draw in one forward pass of a microbatch."""

    def __init__(self, seed: tf.Tensor):
        self._seed = seed
        self._count: dict[int, int] = {}

    def seed_of_next(self, layer: int) -> tf.Tensor:
        """Returns the seed of the next numbers of a layer, int32 [2]."""
        turn = self._count.get(layer, 0)
        self._count[layer] = turn + 1
        fold_in = tf.random.experimental.stateless_fold_in
        return fold_in(fold_in(self._seed, layer), turn)


class StepSeeds:
    """The seeds of a model's steps.

    Args:
        process: its number, so that no two of a job draw the same numbers.
    """

    def __init__(self, model: tf.keras.Model, process: int = 0):
        self._model = model
        # Keras seeds its own generators so.
        drawn = 0 if ARE_KEPT else random.randrange(2**31)
        self._base = (drawn + process) % 2**31

    def of_step(self) -> tf.Tensor:
        """Returns int32 [2] for the step that comes."""
        step = tf.cast(tf.convert_to_tensor(steps_of(self._model.optimizer)), tf.int32)
        return tf.stack([tf.constant(self._base, tf.int32), step])


def microbatch(
    step_seed: tf.Tensor, number: int, chunk: int
) -> contextlib.AbstractContextManager[None]:
    """Encloses a forward pass of microbatch ``number`` through ``chunk``, in training."""
    return step_context.within(draws=_Draws(_seed_of(step_seed, number, chunk)))


@contextlib.contextmanager
def repeatable(step_seed: tf.Tensor, number: int, chunk: int) -> Iterator[None]:
    """Does as ``microbatch``; the layers of Keras 3, too, draw the same when it runs once more."""
    with (
        microbatch(step_seed, number, chunk),
        drawing_by(_seed_of(step_seed, number, chunk)),
    ):
        yield


def _seed_of(step_seed: tf.Tensor, number: int, chunk: int) -> tf.Tensor:
    folded = tf.random.experimental.stateless_fold_in(step_seed, number)
    return tf.random.experimental.stateless_fold_in(folded, chunk)


def draw_apart(process: int) -> None:
    """Has the step that is traced draw other numbers than those of other processes.

    After ``keras.utils.set_random_seed`` all of them have one seed, so that they shuffle alike. The
    first draws what one device does. Only a step's graph is changed, and once.
    """
    graph = tf.compat.v1.get_default_graph()
    if graph.seed is not None and graph not in _seeded_apart:
        graph.seed = (graph.seed + process * _APART) % 2**31
        _seeded_apart.add(graph)


def is_seeded(layer: tf.keras.layers.Layer) -> bool:
    """Whether ``repeatable`` holds for the numbers of ``layer``, or of the layers inside."""
    return any(_draws_at_once(part) or has_seed(part) for part in layers_in(layer))


def drawing_layers(layer: tf.keras.layers.Layer) -> list[tf.keras.layers.Layer]:
    """Returns ``layer`` and the layers in it that draw random numbers in training.

    One whose rate is 0 draws none. Parts of a layer that draws, such as the cell of a recurrent one
    or the Dropout of attention, are named with it.
    """
    found, within = [], set()
    for part in layers_in(layer):
        if id(part) not in within and _draws_in_training(part):
            found.append(part)
            within |= {id(inner) for inner in layers_in(part)}
    return found


def _draws_in_training(layer: Any) -> bool:
    if augments(layer):
        amounts = [value for name, value in layer.get_config().items() if name in _AMOUNTS]
        return not amounts or any(np.any(amount) for amount in amounts if amount is not None)
    names = ("rate", "stddev") if isinstance(layer, _NOISE) else _RATES
    rates = (getattr(layer, name, None) for name in names)
    # A rate may be a tensor, whose value nobody knows.
    return any(rate > 0 if isinstance(rate, (int, float)) else tf.is_tensor(rate) for rate in rates)


def _draws_at_once(layer: Any) -> bool:
    return random_generator(layer) is not None and not augments(layer)


def augments(layer: tf.keras.layers.Layer) -> bool:
    """Whether ``layer`` augments images: drawing for one after the other, in a loop."""
    kind = type(layer).__name__
    return kind.startswith("Random") and kind != "RandomFourierFeatures"  # Drawn when it is built.


def put_on(binding: Binding) -> None:
    """Lets the layers of a model that draw random numbers follow ``microbatch``."""
    drawing = (layer for layer in layers_in(binding.model) if _draws_at_once(layer))
    for number, layer in enumerate(drawing):
        generator = random_generator(layer)
        draws = {n: _draw(number, getattr(generator, n), seeded) for n, seeded in _DRAWS.items()}
        binding.put(generator, draws)


def _draw(layer: int, unseeded: Callable, seeded: Callable) -> Callable:
    def draw(*args: Any, **options: Any) -> tf.Tensor:
        draws = step_context.current().draws
        if draws is None:
            return unseeded(*args, **options)
        return seeded(draws.seed_of_next(layer), *args, **options)

    return draw


def _dropout(seed: tf.Tensor, inputs: Any, rate: float, noise_shape: Any = None) -> tf.Tensor:
    return tf.nn.experimental.stateless_dropout(inputs, rate, seed, noise_shape=noise_shape)


def _normal(
    seed: tf.Tensor, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, **_: Any
) -> tf.Tensor:
    return tf.random.stateless_normal(shape, seed, mean, stddev, _float(dtype))


def _truncated(
    seed: tf.Tensor, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, **_: Any
) -> tf.Tensor:
    return tf.random.stateless_truncated_normal(shape, seed, mean, stddev, _float(dtype))


def _uniform(
    seed: tf.Tensor, shape: Any, minval: Any = 0.0, maxval: Any = None, dtype: Any = None, **_: Any
) -> tf.Tensor:
    return tf.random.stateless_uniform(shape, seed, minval, maxval, _float(dtype))


def _float(dtype: Any) -> Any:
    return dtype or tf.keras.backend.floatx()


_DRAWS = {
    "dropout": _dropout,
    "random_normal": _normal,
    "random_uniform": _uniform,
    "truncated_normal": _truncated,
}


def unseeded(graph: tf.Graph, operations: Sequence[tf.Operation]) -> list[str]:
    """Returns names of ``operations`` of ``graph`` that draw other numbers each time they run."""
    readers = _readers_of_shared_seed(graph)
    found = [op.name for op in operations if op.type in _UNSEEDED or op.name in readers]
    return found or of_types(graph, operations, _UNSEEDED.__contains__)


def of_types(
    graph: tf.Graph, operations: Sequence[tf.Operation], is_one: Callable[[str], bool]
) -> list[str]:
    """Returns names of ``operations`` of such types, else of those in the functions they call."""
    found = [op.name for op in operations if is_one(op.type)]
    called = {
        attribute.func.name
        for op in operations
        for attribute in op.node_def.attr.values()
        if attribute.HasField("func")
    }
    return found or (_within(called, graph, is_one) if called else [])


def _readers_of_shared_seed(graph: tf.Graph) -> set[str]:
    """Returns names of operations of a step that read what all of a process draw from."""
    seed = shared_seed()
    captured = [] if seed is None else getattr(graph, "captures", ())
    places = [place for handle, place in captured if handle is seed.handle]
    return {reader.name for place in places for reader in place.consumers()}


def drawn_in(model: tf.keras.Model, names: Sequence[str], *, by_keras: bool = False) -> list[str]:
    """Returns what draws numbers in a step of ``model``, for people.

    Args:
        names: of the operations that draw them, see ``unseeded``.
        by_keras: whether Keras' own layers are told of, too.
    """
    layers = {layer.name: layer for layer in layers_in(model) if layer is not model}
    # Loops of layers that augment carry no layer's name.
    whole = "train_step" if written_anew(model, "train_step") else f"model '{model.name}'"
    tells_whole = _is_of_a_user(model) and not any(augments(layer) for layer in layers.values())
    found = []
    for operation in names:
        within = [name for scope in operation.split("/") if (name := layer_of_scope(scope, layers))]
        if within and (by_keras or _is_of_a_user(layers[within[-1]])):
            found.append(f"layer '{within[-1]}'")
        elif not within and (by_keras or tells_whole):
            found.append(whole)
    return list(dict.fromkeys(found))


class Draws:
    """Finds what draws random numbers in the steps of a model, and tells once what of the user's
    own does where a batch is divided.

    Args:
        by_microbatch: whether a replica meets its rows in parts.
    """

    def __init__(self, binding: Binding, *, by_microbatch: bool = False):
        self._binding = binding
        self._by_microbatch = by_microbatch
        self._line = ToldOnce()

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Encloses a step that is traced."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        before = 0 if graph is None else len(graph.get_operations())
        try:
            yield
        except ValueError as error:
            if _MADE_LATE not in str(error):
                raise
            raise ModelError(
                "a model must have all its variables before a step is traced, and keras.random "
                "makes one on each replica where it is given no seed",
                received=first_line(error),
                mend="Make variables in build, and give keras.random a keras.random.SeedGenerator "
                "that the layer has made in __init__, as seed",
            ) from error
        if graph is None or not self._binding.collective.is_chief:
            return
        model = self._binding.model
        names = unseeded(graph, graph.get_operations()[before:])
        self._binding.drawing = drawn_in(model, names, by_keras=True)
        found = drawn_in(model, names)
        if found and (self._by_microbatch or self._binding.collective.num_replicas > 1):
            self._line.failed(
                f"{', '.join(found)} draws random numbers by itself: other ones for each part of a "
                "batch that is divided, so weights are not one device's"
            )


def _is_of_a_user(layer: Any) -> bool:
    return isinstance(layer, _L.Lambda) or not is_keras(type(layer).__module__)


def refuse_unseeded(graph: tf.Graph, operations: Sequence[tf.Operation]) -> None:
    """Raises:
    OptionError: one of ``operations`` of ``graph`` draws numbers that it would not draw again.
    """
    found = unseeded(graph, operations)
    if found:
        raise OptionError(
            "layers that recompute runs twice must draw the same random numbers each time",
            received=f"operation '{found[0]}'",
            mend="Draw with tf.keras.layers.Dropout or GaussianNoise, or leave recompute out",
        )


def _within(names: set[str], graph: tf.Graph, is_one: Callable[[str], bool]) -> list[str]:
    """Returns operations of the functions called ``names``, and of those that they call."""
    library = {each.signature.name: each for each in graph.as_graph_def().library.function}
    waiting, seen, found = list(names), set(), []
    while waiting:
        name = waiting.pop()
        if name in seen or name not in library:
            continue
        seen.add(name)
        for node in library[name].node_def:
            if is_one(node.op):
                found.append(node.name)
            waiting += [a.func.name for a in node.attr.values() if a.HasField("func")]
    return found
