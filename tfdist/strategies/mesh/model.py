"""A compiled Keras model on a mesh: what its methods do there.

Outside of a fit the host's weights are the truth, inside of it the slices are. So what a user sets
before a fit is trained on, and what is read after it is what was trained; see ``HostWeights`` for
what callbacks read and set.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import ModelError
from tfdist.keras.layers import replaced
from tfdist.strategies.mesh.layout import Layout
from tfdist.strategies.mesh.operations import MeshDevices
from tfdist.strategies.mesh.optimizer import check_optimizer
from tfdist.strategies.mesh.ranks import DividedSlots, RankParts, true_labels
from tfdist.strategies.mesh.recompute import Segments
from tfdist.strategies.mesh.state import SlicedState
from tfdist.strategies.mesh.steps import MeshSteps, plan
from tfdist.training.engine.binding import LOOPS, Binding, Engine, Saving
from tfdist.training.engine.collective import Collective
from tfdist.training.engine.options import StepOptions
from tfdist.training.memory.emptied_variable import listen
from tfdist.training.model.refusals import (
    refuse_eager,
    refuse_own_loss,
    refuse_own_steps,
    refuse_undense_inputs,
)


def check_model(model: tf.keras.Model) -> None:
    """Raises ModelError for a model whose steps would not be those of Keras."""
    refuse_own_steps(model, "mesh")
    refuse_own_loss(model, "mesh")
    refuse_eager(model, "mesh")
    named = keras.tensors.path_of
    constrained = [named(v) for v in model.weights if getattr(v, "constraint", None) is not None]
    if constrained:
        raise ModelError(
            "weights on a mesh must have no constraints, since a slice does not know the norm of "
            "the whole",
            received=f"a constraint of {', '.join(constrained[:3])}",
            mend="Leave the constraint out, or use a regularizer",
        )
    refuse_undense_inputs(model, "mesh")
    unknown = [symbol.name for symbol in model.inputs if None in symbol.shape[1:]]
    if unknown:
        raise ModelError(
            "a mesh must know the shape of a record",
            received=f"input {unknown[0]} with an unknown dimension",
            mend="Give keras.Input the whole shape",
        )
    check_optimizer(model.optimizer)


class MeshModel:
    """What a model on a mesh has beside the Keras model itself."""

    def __init__(
        self,
        model: tf.keras.Model,
        devices: MeshDevices,
        layout: Layout,
        ranks: Collective,
        *,
        keep_host_copy: bool,
        options: StepOptions,
    ):
        check_model(model)
        plan(model, layout, devices.axis_size("batch") * 2)
        self.model = model
        self.devices = devices
        self.layout = layout
        divides = options.shards and ranks.shares_batches
        self.state = SlicedState(
            model, devices, layout.settled, RankParts(ranks) if divides else None
        )
        self._ranks = ranks
        self._sharded = DividedSlots(model, ranks, self.state) if divides else None
        self.segments = (
            Segments.of(model, options.recomputed_layers) if options.recomputes else None
        )
        self.steps = self._new_steps()
        self._keep_host_copy = keep_host_copy
        self._slices_are_newer = False
        self.host = HostWeights(model, self.state, lambda: self._slices_are_newer)
        self._depth = 0
        if not keep_host_copy:
            self.state.release_host()
            self._slices_are_newer = True

    # Which side is the truth --------------------------------------------------------------------

    def _to_slices(self) -> None:
        """The slices become the truth, as the host's weights are."""
        self.state.scatter_weights()
        self._slices_are_newer = True

    def to_host(self) -> None:
        """Brings the host's weights up to date."""
        if self._slices_are_newer:
            self.state.gather_weights()

    def set_from_host(self) -> None:
        """The host's weights were written: the slices follow."""
        self._to_slices()
        self._settle()

    def _settle(self) -> None:
        """After a run: the host's weights become the truth, or are released."""
        if self._depth:
            return
        if self._keep_host_copy:
            self.to_host()
            self._slices_are_newer = False
        else:
            self.host.to_slices()
            self.state.release_host()
            self.host.to_functions()

    # Keras' methods -----------------------------------------------------------------------------

    def engine(self) -> Engine:
        """Returns what is put on the Keras model."""
        steps = {"train": self._train, "test": self._test, "predict": self._predict}
        return Engine(
            programs={
                f"make_{name}_function": self._making(name, step) for name, step in steps.items()
            },
            around=(
                (LOOPS, self._run),
                (("save", "save_weights"), self._reads_all),
                (("get_weights",), lambda _: self._get_weights),
                (("set_weights",), self._writes_weights),
                (("load_weights",), self._reads_file),
            ),
            compiled=self._compiled,
            takes_shares=True,
            weights=self._slices_given_out,
            saving=self._saving(),
            sharded=self._sharded,
            knows=self,
        )

    def _slices_given_out(self) -> list[tf.Variable]:
        """Returns the slices to one who may write them, as all ranks begin with the chief's."""
        if self._slices_are_newer:
            self.host.to_slices()
            self.host.fall_behind()
        return self.state.all_slices()

    def _run(self, method: Callable) -> Callable:
        def run(*args: Any, **options: Any) -> Any:
            self._depth += 1
            try:
                if self._depth == 1 and not self._slices_are_newer:
                    self._to_slices()
                self.host.to_slices()
                return method(*args, **options)
            finally:
                self._depth -= 1
                self._settle()

        return run

    def _reads_all(self, method: Callable) -> Callable:
        """Keras writes the model and its optimizer: both whole, as on one device."""

        def run(*args: Any, **options: Any) -> Any:
            try:
                with self.written():
                    return method(*args, **options)
            finally:
                self._settle()

        return run

    def _get_weights(self) -> list[Any]:
        if self._slices_are_newer:
            self.host.to_slices()
            return [self.state.of(variable).gather() for variable in self.model.weights]
        return [variable.numpy() for variable in self.model.weights]

    def _writes_weights(self, method: Callable) -> Callable:
        def run(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            self.set_from_host()
            return result

        return run

    def _reads_file(self, method: Callable) -> Callable:
        def run(filepath: Any, *args: Any, **options: Any) -> Any:
            name = os.fspath(filepath)
            holds_slots = not name.endswith(".h5") or name.endswith(".weights.h5")
            if holds_slots and self._sharded is not None:
                raise ModelError(
                    "a mesh whose slots ranks divide (shard='optimizer') must read weights from a "
                    "file .h5 whose name does not end in .weights.h5, which holds no slots",
                    received=f"load_weights({name!r})",
                    mend="Give model.fit tfdist.Checkpoints(folder, resume=True) for both",
                )
            optimizer = self.model.optimizer
            # On one device there are no slots before the first step: Keras leaves out the file's.
            has_slots = self.state.came_built or int(keras.optimizers.steps_of(optimizer))
            is_new = name.endswith((".weights.h5", ".keras")) and not has_slots
            if holds_slots and not is_new:
                with self.restored():
                    return method(filepath, *args, **options)
            self.to_host()
            unused = type(optimizer).from_config(optimizer.get_config())
            with replaced(self.model, optimizer=unused):
                result = method(filepath, *args, **options)
            self.set_from_host()
            return result

        return run

    def _compiled(self) -> None:
        check_model(self.model)
        self.state.attach_optimizer()
        self.steps = self._new_steps()

    def _new_steps(self) -> MeshSteps:
        return MeshSteps(self.state, self.layout, self._ranks, self.segments)

    # Checkpoints --------------------------------------------------------------------------------

    def _saving(self) -> Saving:
        """Returns how checkpoints hold the model whole, as one on one device."""
        return Saving(
            beside=lambda _: {"optimizer": self.state.host_optimizer()},
            written=self.written,
            restored=self.restored,
        )

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Encloses the writing of the model: it and its optimizer are whole, as on one device."""
        self.to_host()
        if self._sharded is None:
            self.state.gather_optimizer()
        with (
            self._whole_slots(),
            replaced(self.model, optimizer=self.state.host_optimizer()),
            replaced(self.host, traces_are_ours=True),
        ):
            yield

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Encloses the reading of the model from a file: the slices follow."""
        with self._whole_slots():
            with self.written():
                yield
            self.state.scatter_optimizer()
        self.set_from_host()

    def _whole_slots(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._sharded is None else self._sharded.whole()

    # Steps --------------------------------------------------------------------------------------
    # Batches are taken from the iterator outside of the traced step, so that their shape is known.

    def _train(self, batch: Any) -> Any:
        self.host.to_slices()
        try:
            return self.steps.train(*self._taken(batch))
        finally:
            self.host.fall_behind()

    def _test(self, batch: Any) -> Any:
        return self.steps.test(*self._taken(batch))

    def _taken(self, batch: Any) -> tuple[Any, Any, Any, Any]:
        x, y, weight, told = true_labels(batch, self._ranks)
        if not self.steps.are_built:
            self.steps.are_built = True
            keras.steps.build_all(self.model, (x, y, weight))
        return x, y, weight, told

    def _predict(self, batch: Any) -> Any:
        x, _, _, told = true_labels(batch, self._ranks)
        outputs = self.steps.predict(x)
        if told is not None:
            outputs = tf.nest.map_structure(lambda rows: rows[: told[0]], outputs)
        return outputs

    def _making(self, name: str, step: Callable) -> Callable:
        """Returns what Keras makes its function of ``name`` by: several steps in an execution."""

        def make(force: bool = False) -> Callable:
            def run(given: Any) -> Any:
                made = []
                steps, batches = keras.steps.batches_of_execution(self.model, name, given)
                for _ in range(steps):
                    # Of a training the last step's alone.
                    made = [*(made if name == "predict" else ()), step(next(batches))]
                    keras.steps.count_step(self.model, name)
                if name != "predict" or len(made) == 1:
                    return made[-1]
                return tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *made)

            setattr(self.model, f"{name}_function", run)
            return run

        return make


class HostWeights:
    """The host's weights while their slices are the truth: what reads them, and what writes them.

    Who reads one that steps have trained since brings its slices together; what is written goes to
    the slices. A ``tf.function`` is heard of when it is traced, and not when it runs: the weights
    that it uses are carried at each step.

    Args:
        are_behind: whether the slices are the truth.
    """

    def __init__(self, model: tf.keras.Model, state: SlicedState, are_behind: Callable[[], bool]):
        self._weights = list(model.weights)
        self._state = state
        self._are_behind = are_behind
        #: Of functions: those that read a weight may run at any time, and so may those that write.
        self._traced_reads: dict[int, tf.Variable] = {}
        self._traced_writes: dict[int, tf.Variable] = {}
        #: While the model is written: no callback runs what is traced then.
        self.traces_are_ours = False

    def heard_by(self, binding: Binding) -> None:
        for variable in self._weights:
            listen(
                binding,
                keras.tensors.uncast(variable),
                before_read=partial(self._bring, variable),
                after_write=partial(self._take, variable),
            )

    def to_slices(self) -> None:
        """Gives the slices what functions may have written."""
        for variable in self._traced_writes.values():
            if id(variable) not in self._state.behind:
                self._state.scatter_weight(variable)

    def fall_behind(self) -> None:
        """After the slices have changed: functions alone find the host's weights up to date."""
        self._state.behind.update(map(id, self._weights))
        self.to_functions()

    def to_functions(self) -> None:
        for variable in (self._traced_reads | self._traced_writes).values():
            self._state.gather_weight(variable)

    def _is_traced(self) -> bool:
        """Whether a function is traced that may run at any time."""
        if self.traces_are_ours or not tf.inside_function():
            return False
        graph = tf.compat.v1.get_default_graph()
        while graph is not None:  # Within a loop of a recurrent layer, too.
            # A layer is called on a symbol, of Keras 2 or 3: nothing runs.
            if getattr(graph, "name", "").startswith(("keras_graph", "scratch_graph")):
                return False
            graph = getattr(graph, "outer_graph", None)
        return True

    def _bring(self, variable: tf.Variable) -> None:
        if self._is_traced():
            self._traced_reads[id(variable)] = variable
        if self._are_behind():
            with tf.init_scope():
                self._state.gather_weight(variable)

    def _take(self, variable: tf.Variable) -> None:
        if self._is_traced():
            self._traced_writes[id(variable)] = variable
        elif not tf.inside_function() and self._are_behind():
            self._state.scatter_weight(variable)
