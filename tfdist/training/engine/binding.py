"""One built model, and all that a strategy has put on it.

A model keeps its class and its file format: what it does otherwise is put on the instance, on its
layers too, and by its binding alone. From within to without:

1. what ``Engine.within`` encloses: methods that must wait for an engine, Keras' loops among them;
2. ``Engine.programs``: what Keras' loops call for each step, ``make_train_function`` and its like;
3. layers that a step divides: BatchNormalization, random numbers, recomputation;
4. the three steps: those that all share, the user's own on each replica, or ``Engine.steps``;
5. the loops: ``fit``, ``evaluate`` and ``predict`` and those of one batch, or ``Engine.loops``;
6. what ``Engine.around`` encloses: loops and files, where weights lie elsewhere between them;
7. ``compile``, whose hooks run in the order in which they came;
8. the reader of weights, and the writers of files, on processes that leave them to the chief.

``assemble`` puts them on in this order.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras.layers import replaced
from tfdist.keras.losses import told_names
from tfdist.training.engine.collective import Collective
from tfdist.training.engine.metrics import MergedResults
from tfdist.training.engine.options import StepOptions

# Where a built model keeps its binding: they live as long as each other.
_PLACE = "_tfdist_binding"

#: Keras' loops, and its steps on one batch.
LOOPS = (
    "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch",
)  # fmt: skip

#: Names of methods, and what is made of each: method -> what takes its place.
Enclosure = tuple[Iterable[str], Callable[[Callable[..., Any]], Callable[..., Any]]]


def _optimizer_of(model: Any) -> dict[str, Any]:
    return {"optimizer": model.optimizer}


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What an engine adds to the writing and reading of checkpoints.

    Attributes:
        beside: model -> what is saved with it: name -> a variable or another trackable object.
        written: returns a context that encloses the writing of a checkpoint, as where weights that
            lie on several devices are brought together.
        restored: returns a context that encloses the reading of one.
        unwritten: names in ``beside`` that checkpoints of earlier versions may lack.
    """

    beside: Callable[[Any], dict[str, Any]] = _optimizer_of
    written: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    restored: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    unwritten: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What an engine puts on a model of its own, or instead of what all share.

    Attributes:
        within: put on first, so that Keras' own loops are enclosed.
        programs: name of a method or setting of Keras' -> what takes its place.
        steps: has ``train_step``, ``test_step`` and ``predict_step``.
        takes_shares: whether its steps know themselves what of a global batch a process has.
        in_microbatches: whether its steps call layers once for each of several microbatches.
        weights: returns what holds the model's weights in a fit; None: the model itself.
        loops: name of a loop -> what takes its place.
        around: put on last, so that the loops of tfdist are enclosed.
        compiled: called whenever the model has been compiled anew.
        saving: what it adds to checkpoints.
        sharded: divides the optimizer's slots among processes, in the manner of
            ``sharded_slots.ShardedSlots``, where its steps do that themselves.
        knows: whatever the engine needs of the model again, as to describe it.
    """

    within: tuple[Enclosure, ...] = ()
    programs: Mapping[str, Any] = field(default_factory=dict)
    steps: Any = None
    takes_shares: bool = False
    in_microbatches: bool = False
    weights: Callable[[], list[tf.Variable]] | None = None
    loops: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    around: tuple[Enclosure, ...] = ()
    compiled: Callable[[], None] | None = None
    saving: Saving = Saving()
    sharded: Any = None
    knows: Any = None


class Binding:
    """A built model, the replicas that it trains on, and what has been put on it.

    Attributes:
        model, collective: as given.
        results: of the metrics of all processes.
        engine: what the engine has put on it; set by ``assemble``.
        options: of its train step; set by ``assemble``.
        sharded: the ``sharded_slots.ShardedSlots`` of an optimizer whose slots the replicas divide,
            else None.
        alike_look_ups: references of tables, see ``shared_embedding_rows``; known before the first
            step.
        moved: a ``layer_state.Moved`` for each thing that the user's own layers change in a step;
            known before the first one.
        has_told_of_step: whether the user knows that a train_step of his own is not exact here.
        drawing: what draws random numbers in the traced step that no checkpoint holds, for people.
        noise: a ``gradient_noise.GradientNoise`` that steps tell their gradients; None without.
        grown: (optimizer, gain, rate) that a fit has left whose batch had grown; None: none has.
        takes_body: whether a fit runs whose steps are the body of a user's own loop.
        traced_body: that of the last loop, and how often the model was compiled then; and what
            Keras has traced of it.
        own_steps: the ``custom_steps.OwnSteps`` of replicas that share batches, else None.
        put_on: (class, method) of all that was put on the model and its layers, in order.
        times_compiled: since it was built.
    """

    def __init__(self, model: tf.keras.Model, collective: Collective):
        self.model = model
        self.collective = collective
        self.results = MergedResults(model, collective)
        self.engine = Engine()
        self.options = StepOptions()
        self.own_steps: Any = None
        self.sharded: Any = None
        self.alike_look_ups: frozenset[Any] = frozenset()
        self.moved: Sequence[Any] = ()
        self.has_told_of_step = False
        self.drawing: Sequence[str] = ()
        self.noise: Any = None
        self.grown: tuple[Any, float, float] | None = None
        self.takes_body = False
        self.traced_body: tuple[Any, Any] = (None, None)
        self.put_on: list[tuple[str, str]] = []
        self.times_compiled = 0
        self._when_compiled: list[Callable[[], None]] = []
        vars(model)[_PLACE] = self  # Keras would look for variables in it.

    def put(self, owner: Any, values: Mapping[str, Any]) -> None:
        """Puts ``values`` in the place of attributes of the model, its layers or its weights."""
        for name, value in values.items():
            setattr(owner, name, value)
            self.put_on.append((type(owner).__name__, name))

    def around(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Has ``call`` be asked in the place of a method of ``owner``, which it is given; once.

        Args:
            call: of (owner, its method, what that is called with).
        """
        own = getattr(owner, name)
        known = getattr(own, "asks", ())
        if call in known:
            return

        def asked(*args: Any, **options: Any) -> Any:
            return call(owner, own, *args, **options)

        asked.asks = (call, *known)
        self.put(owner, {name: asked})

    def call_by(self, layer: Any, call: Callable[..., Any]) -> None:
        """Has ``call`` be asked in the place of a layer's own, which it is given.

        Args:
            call: of (that of the layer, inputs, training, mask).
        """
        own = layer.call

        # A method of the layer: Keras' writer of SavedModels traces nothing else.
        def called(_layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            return call(own, inputs, training, mask)

        self.put(layer, {"call": types.MethodType(called, layer)})

    @contextlib.contextmanager
    def taking(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Encloses a fit whose steps are the body of a user's own loop.

        Args:
            values: name of an attribute of the model -> what is in its place meanwhile.
        """
        with replaced(self.model, **values), replaced(self, takes_body=True):
            yield

    def whole_slots(self) -> contextlib.AbstractContextManager:
        """Encloses what writes the optimizer's slots to files, on all processes."""
        return contextlib.nullcontext() if self.sharded is None else self.sharded.whole()

    def begun_slots(
        self, *, restores: bool = False, in_parts: bool = False
    ) -> contextlib.AbstractContextManager:
        """Encloses what is done before the first step: see ``ShardedSlots.begun``."""
        if self.sharded is None:
            return contextlib.nullcontext()
        return self.sharded.begun(restores=restores, in_parts=in_parts)

    def held(self, variables: Iterable[Any]) -> list[Any]:
        """Returns those of the model's or its optimizer's ``variables`` that have a value here."""
        return list(variables) if self.sharded is None else self.sharded.held(list(variables))

    def enclose(self, enclosures: Iterable[Enclosure]) -> None:
        """Puts enclosed methods of the model in their own place."""
        for names, enclosed in enclosures:
            for name in names:
                self.put(self.model, {name: enclosed(getattr(self.model, name))})

    def when_compiled(self, then: Callable[[], None]) -> None:
        """Calls ``then`` whenever the model is compiled anew, after those that came before."""
        self._when_compiled.append(then)

    def compiled(self) -> None:
        """Tells that the model has been compiled anew."""
        self.times_compiled += 1
        for then in self._when_compiled:
            then()


def metric_names(model: tf.keras.Model) -> list[str]:
    """Returns the names of the results of a model, those of losses first.

    Keras 3 tells no names of compiled metrics: there they are those of the last results.
    """
    names = told_names(model)
    return binding_of(model, "the names of metrics").results.names if names is None else names


def whole_slots(model: Any) -> contextlib.AbstractContextManager:
    """See ``Binding.whole_slots``; of a model that no strategy has built there is nothing to do."""
    binding = vars(model).get(_PLACE)
    return contextlib.nullcontext() if binding is None else binding.whole_slots()


def held_of(model: Any, variables: Iterable[Any]) -> list[Any]:
    """Returns those ``variables`` of any model that have a value in this process."""
    binding = vars(model).get(_PLACE)
    return list(variables) if binding is None else binding.held(variables)


_Known = TypeVar("_Known")


def known_of(model: Any, kind: type[_Known], needed_by: str) -> _Known:
    """Returns what an engine knows of a model that it has built: see ``Engine``.

    Args:
        kind: of what it knows.
        needed_by: as for ``binding_of``.

    Raises:
        ModelError: no strategy has built the model, or another one has.
    """
    known = binding_of(model, needed_by).engine.knows
    if not isinstance(known, kind):
        raise ModelError(
            f"{needed_by} must be given a model that this strategy has built",
            received=f"model '{model.name}' of another one",
            mend="Give what strategy.build returned",
        )
    return known


def binding_of(model: Any, needed_by: str) -> Binding:
    """Returns the binding of a built model.

    Args:
        needed_by: what needs it, for people.

    Raises:
        ModelError: no strategy has built the model.
    """
    binding = vars(model).get(_PLACE) if hasattr(model, "__dict__") else None
    if binding is None:
        raise ModelError(
            f"{needed_by} must be given a model that strategy.build returned",
            received=f"{getattr(model, 'name', type(model).__name__)}",
            mend="Give what strategy.build returned",
        )
    return binding
