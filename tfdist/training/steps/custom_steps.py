"""A model's own ``train_step``, ``test_step`` and ``predict_step`` on several replicas.

Each replica runs the user's step on its rows, as one device would. What the step gives to an
optimizer is weighted by the replica's part of the global batch and added up over the replicas:
exact for every loss that is a mean over rows plus terms of weights, with any number of optimizers.
Metrics are merged by their state, other numbers that the step returns by rows.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import ModelError
from tfdist.keras import step_context
from tfdist.keras.optimizers import KINDS
from tfdist.keras.trackables import optimizers_of
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.failure_notices import ToldOnce
from tfdist.training.engine.options import StepOptions
from tfdist.training.layers import losses, randomness
from tfdist.training.layers.autograph import for_layers
from tfdist.training.layers.average_loss import take_as_meant
from tfdist.training.layers.batch_norm import average_statistics, shared_step
from tfdist.training.layers.gradients import changed
from tfdist.training.layers.replica_step import JOINS, RunningStep, running_step
from tfdist.training.layers.shared_embedding_rows import added_up
from tfdist.training.steps import layer_state
from tfdist.training.steps.row_numbers import HIDDEN, OTHER, RowNumbers

STEPS = ("train_step", "test_step", "predict_step")
#: The method of an optimizer that all others come to.
APPLY = keras.optimizers.APPLIES[-1]
_NOW_AND_THEN = (
    "a train_step that gives gradients to its optimizer in some steps alone must give those of one "
    "batch: those that it has kept of others count by the rows of the last one, so weights are not "
    "one device's after a smaller last batch. Use Keras' own step and accumulate_steps"
)


def own_steps(model: tf.keras.Model) -> list[str]:
    """Returns which of Keras' three steps the class of ``model`` has written anew."""
    return keras.layers.written_anew(model, *STEPS)


def can_evaluate(model: tf.keras.Model) -> bool:
    """Whether ``model`` can be called, or has a test step of its own."""
    return keras.layers.can_be_called(model) or "test_step" in own_steps(model)


class OwnSteps:
    """Puts a user's own steps in the place of those that all data-parallel engines share."""

    def __init__(self, binding: Binding, options: StepOptions, replica: Any):
        self._binding = binding
        self._model = binding.model
        self._collective = binding.collective
        self._results = binding.results
        self._options = options
        self._replica = replica
        #: What a step returns -> the metric whose result that is, of the last step traced.
        self._metric_of: dict[str, str] = {}
        self._draws = randomness.Draws(binding)
        self._numbers = ToldOnce()
        self._losses = ToldOnce()
        self._gradients = ToldOnce()
        take_as_meant()

    def in_place(self) -> dict[str, Any]:
        """Returns what takes the place of the model's, where its class has written a step anew."""
        model = self._model
        given = {
            name: types.MethodType(getattr(type(model), name), model) for name in own_steps(model)
        }
        if given:
            return self._taking(given, self._merged)
        if not keras.layers.written_anew(model, "compute_metrics"):
            return {}
        return keras.steps.shown_once() | keras.steps.on_results(self._merged)

    def results_of(self, share: tf.Tensor, compute: Callable[[], Any]) -> Any:
        """Returns what ``compute``, a compute_metrics of the user's own, does.

        Results of metrics are noted, for those of all processes to be shown; other numbers are
        made those of the global batch.
        """
        for metric in _metrics(self._model):
            self._binding.around(metric, "result", _noted)
        running = RunningStep(self._collective, losses.part_of(share), share)
        with step_context.within(own_step=running):
            results = compute()
        return self._of_batch(running, results)

    def taking(self, body: Callable[[Any], Any]) -> dict[str, Any]:
        """Returns what has Keras' fit take a user's ``body`` of a loop for the train step.

        Name of an attribute of the model -> what takes its place.
        """
        return self._taking({"train_step": body}, self._with_merged_metrics)

    def _taking(
        self, given: Mapping[str, Callable[[Any], Any]], shown: Callable[[Any], Any]
    ) -> dict[str, Any]:
        taken = {"train_step": self._train, "test_step": self._test, "predict_step": self._predict}
        steps = {name: _of(taken[name], step) for name, step in given.items()}
        return steps | keras.steps.shown_once() | keras.steps.on_results(shown)

    # The three steps ----------------------------------------------------------------------------

    def _train(self, step: Callable[[Any], Any], data: Any) -> Any:
        batch, share = data
        _refuse_unknown_optimizers()
        randomness.draw_apart(self._collective.process)
        for optimizer in optimizers_of(self._model):
            self._binding.around(optimizer, APPLY, self._share_gradients)
        with (
            shared_step(is_real=share[0] > 0),
            keras.seeds.drawing_on(self._replica),
            self._draws.told(),
        ):
            results = self._counted(meeting(step), batch, share, self._binding.moved)
        if not self._options.sync_batch_norm:
            average_statistics(self._model, self._collective)
        return results

    @tf.autograph.experimental.do_not_convert
    def _share_gradients(
        self, optimizer: Any, apply: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Adds up over the replicas what ``optimizer`` is given in a user's step."""
        step, collective = running_step(), self._collective
        if step is None:
            return apply(*args, **options)
        gradients, variables = keras.optimizers.applied(optimizer, args, options)
        self._tell_of_gradients(step, gradients)
        gradients = added_up(gradients, variables, self._binding.alike_look_ups)
        step.apply(optimizer, [_weighted(one, step) for one in gradients], variables)
        # After it: where replicas must meet outside of branches, it has been refused by now.
        if collective.num_replicas > 1 and _is_in_branch() and collective.is_chief:
            print(f"tfdist: warning: {_NOW_AND_THEN}", flush=True)
        return None

    def _test(self, step: Callable[[Any], Any], data: Any) -> Any:
        return self._counted(step, *data)

    def _predict(self, step: Callable[[Any], Any], data: Any) -> Any:
        batch, share = data
        return tf.nest.map_structure(lambda rows: rows[: share[0]], step(batch))

    def _counted(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        share: tf.Tensor,
        moved: Sequence[layer_state.Moved] = (),
    ) -> Any:
        """Runs a step whose metrics count the true rows alone; returns what it does.

        Args:
            moved: what its layers change.
        """
        model = self._model
        losses.as_on_one_device(self._binding)
        for metric in _metrics(model):
            self._binding.around(metric, "result", _noted)
        running = RunningStep(self._collective, losses.part_of(share), share)
        with (
            losses.unmoved_by_padding(lambda: states(model), share[0] > 0),
            losses.counted_as(running.part),
            step_context.within(own_step=running),
        ):
            results = step(batch)
        self._tell_of_losses(running)
        layer_state.merge(
            moved, running.part, lambda own, name: running.sum(own, running.name(name))
        )
        return self._of_batch(running, results)

    def _of_batch(self, running: RunningStep, results: Any) -> Any:
        """Returns what a step, or compute_metrics, has returned as numbers of the global batch."""
        names = {metric.name for metric in _metrics(self._model)}
        # A dict of the user's own stays one: Keras takes its names for those of metrics.
        results = keras.steps.flat(
            results,
            lambda name, value: (
                name in names or all(id(each) in running.results for each in value.values())
            ),
        )
        if not isinstance(results, dict):
            return results
        numbers_shown = keras.steps.flat(results, lambda *_: True)
        self._metric_of |= {
            name: running.results[id(value)]
            for name, value in numbers_shown.items()
            if id(value) in running.results
        }
        # The last microbatch has no numbers of a batch.
        numbers = RowNumbers(running) if self._options.accumulate_steps == 1 else None
        self._tell_of_own(numbers_shown, numbers)
        if numbers is None:
            return results
        return {
            name: self._of_all(numbers, running, name, value) for name, value in results.items()
        }

    def _of_all(self, numbers: RowNumbers, running: RunningStep, name: str, value: Any) -> Any:
        """Returns a number of this replica's rows as that of the global batch.

        Integers are those of the first replica that has rows: all processes must see the same.

        Raises:
            ModelError: its shape is not known, as that of a number for each row.
        """
        if isinstance(value, dict):
            return {n: self._of_all(numbers, running, n, each) for n, each in value.items()}
        value = keras.tensors.raw(value)
        if name in self._metric_of or not tf.is_tensor(value) or isinstance(value, tf.Variable):
            return value
        if self._collective.num_processes > 1 and not value.shape.is_fully_defined():
            raise ModelError(
                "what a step of one's own returns must have one shape on all processes, which show "
                "the same",
                received=f"'{name}' {list(value.shape)}",
                mend="Return a mean over the rows, or the result of a metric",
            )
        if _can_be_mean(value):
            if (join := numbers.join_of(value)) in JOINS:
                return running.joined(value, join)
            own = tf.math.multiply_no_nan(value, tf.cast(running.part, value.dtype))
        elif value.dtype.is_integer:
            # Known in the step alone: TensorFlow would compute an exchange of constants before it.
            is_first = (running.rows_around()[0] == 0) & (running.share[0] > 0)
            own = tf.where(is_first, value, tf.zeros_like(value))
            own = tf.cast(own, tf.int64)  # Engines add up no smaller ones.
        else:
            return value
        return tf.cast(running.sum(own, running.name(name)), value.dtype)

    def _tell_of_own(self, results: dict[str, Any], numbers: RowNumbers | None) -> None:
        """Tells once of what a step returns that stays each replica's own, or may be no mean."""
        if not self._tells():
            return
        shown: dict[str, list[str]] = {}
        for name, value in zip(results, keras.tensors.all_raw(results.values()), strict=True):
            # A variable may be a count of steps.
            if tf.is_tensor(value) and not isinstance(value, tf.Variable):
                way = None if name in self._metric_of else _shown_as(value, numbers)
                if way is not None:
                    listed = f"'{name}' ({value.dtype.name} {list(value.shape)})"
                    shown.setdefault(way, []).append(listed)
        if shown:
            lines = (
                f"{', '.join(names)} of a step of one's own {way}" for way, names in shown.items()
            )
            self._numbers.failed(
                f"{'; '.join(lines)}. Return a float that is a mean over rows, or the result of a "
                "metric"
            )

    def _tell_of_losses(self, running: RunningStep) -> None:
        """Tells once of a loss whose gradient is none of one device: see ``row_numbers``."""
        # A loss that counts by something else than rows is weighted by that.
        tells = self._tells_of_gradients() and not running.loss_weights
        if tells and any(map(RowNumbers(running).is_off, running.losses)):
            self._losses.failed(
                "the loss of a train_step of one's own is no mean over the rows of a batch, "
                "which are divided here, so its gradient is not that of one device"
            )

    def _tell_of_gradients(self, running: RunningStep, gradients: Sequence[Any]) -> None:
        """Tells once of gradients that the step has made others of, as by their norm."""
        numbers = RowNumbers(running)
        dense = (g for g in gradients if tf.is_tensor(g) and not isinstance(g, tf.IndexedSlices))
        tells = self._tells_of_gradients()
        if tells and any(numbers.join_of(gradient) == OTHER for gradient in dense):
            self._gradients.failed(
                "a train_step of one's own makes of its gradients what is no mean over the rows of "
                "a batch, as clipping does: these are of a replica's rows here, so weights are not "
                "those of one device. Have the optimizer clip (global_clipnorm, clipnorm, "
                "clipvalue), which is given the gradients of all rows"
            )

    def _tells_of_gradients(self) -> bool:
        """Whether to tell what a trial before the first step has not, as of a step that draws."""
        return self._tells() and not self._binding.has_told_of_step

    def _tells(self) -> bool:
        return self._collective.num_replicas > 1 and self._collective.is_chief

    def _merged(self, logs: Any) -> Any:
        """Returns what a loop shows: results of metrics are those of all processes.

        All are, as Keras has it, where the names are those of the model's metrics.
        """
        merged = self._results()
        is_of_metrics = isinstance(logs, dict) and set(logs) == set(merged)
        return merged if is_of_metrics else self._with_merged_metrics(logs, merged)

    def _with_merged_metrics(self, logs: Any, merged: Mapping[str, Any] | None = None) -> Any:
        if not isinstance(logs, dict):
            return logs
        merged = self._results() if merged is None else merged
        return {
            name: merged.get(self._metric_of[name], value) if name in self._metric_of else value
            for name, value in logs.items()
        }


def _shown_as(value: tf.Tensor, numbers: RowNumbers | None) -> str | None:
    """Returns how a number that is none of the global batch is shown; None where it is one.

    Args:
        numbers: of the step; None where a batch is divided into microbatches.
    """
    if numbers is None or not _can_be_mean(value):
        return "is shown as the first replica has it, of its rows alone"
    join = numbers.join_of(value)
    if join == OTHER:
        return "is shown as a mean over replicas, and is none over rows"
    if join == HIDDEN:
        return "is shown as a mean over replicas, whatever a function or a branch makes of rows"
    if join is None and value.shape.rank:
        return "is shown as a mean over replicas, which is none of a number for each row"
    return None


def _can_be_mean(value: Any) -> bool:
    """Whether numbers of replicas can be those of the global batch, by their parts."""
    return tf.is_tensor(value) and value.shape.is_fully_defined() and value.dtype.is_floating


def meeting(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns ``step``, whose replicas must meet outside of branches and functions.

    Layers of a user's own may ask ``if`` of a tensor in it, as in Keras' own.

    Raises:
        ModelError: when it is traced: they would meet within one.
    """

    @tf.autograph.experimental.do_not_convert
    def met(batch: Any) -> Any:
        try:
            with for_layers():
                return step(batch)
        except RuntimeError as error:
            if "`merge_call` called while defining a new graph" not in str(error):
                raise
            raise ModelError(
                "a step of one's own must give gradients to its optimizer outside of tf.cond, "
                "loops and tf.function, for that is where replicas meet",
                received="apply_gradients within one of these",
                mend="Give those of its batch in each step; to add up several batches, use Keras' "
                "own step and accumulate_steps",
            ) from error

    return met


def _of(taken: Callable[..., Any], given: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def step(data: Any) -> Any:
        return taken(given, data)

    return step


def _metrics(model: tf.keras.Model) -> list[Any]:
    """Returns the metrics of ``model``, those too that Keras lists when they have been called."""
    found = [*model.metrics, *keras.losses.unlisted_metrics(model)]
    return list({id(metric): metric for metric in found}.values())


def states(model: tf.keras.Model) -> list[tf.Variable]:
    return keras.tensors.all_raw(v for metric in _metrics(model) for v in metric.variables)


# What a user's step calls ------------------------------------------------------------------------


def _is_in_branch() -> bool:
    """Whether what is traced runs in some steps alone."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and type(graph).__name__ != "CondBranchFuncGraph":
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def _refuse_unknown_optimizers() -> None:
    """Has all other optimizers refuse to be called in a user's step; once for each process."""
    for kind in KINDS:
        given = getattr(kind, APPLY, None)
        if given is not None and not hasattr(given, "refuses"):
            setattr(kind, APPLY, _refusing(given))


def _refusing(given: Callable[..., Any]) -> Callable[..., Any]:
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(given)
    def apply(optimizer: Any, *args: Any, **options: Any) -> Any:
        if running_step() is None:
            return given(optimizer, *args, **options)
        raise ModelError(
            "an optimizer that a step of one's own calls must be an attribute of the model, to be "
            "shared by the replicas and kept in checkpoints",
            received=f"the optimizer {type(optimizer).__name__} from elsewhere",
            mend="Write self.optimizer = ... (or another name) in the model's __init__ or compile",
        )

    apply.refuses = True
    return apply


def _weighted(gradient: Any, step: RunningStep) -> Any:
    """Returns a gradient as this replica's part of that of the global batch."""
    if gradient is None:
        return None
    factor = step.part * losses.uncounted(step.collective)
    return changed(
        gradient, lambda values: tf.math.multiply_no_nan(values, tf.cast(factor, values.dtype))
    )


@tf.autograph.experimental.do_not_convert
def _noted(metric: Any, result: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Has a user's step know which of the numbers that it returns are results of metrics."""
    value = result(*args, **options)
    step = running_step()
    if step is not None:
        named = value if isinstance(value, dict) else {metric.name: value}
        step.results |= {id(each): name for name, each in named.items() if tf.is_tensor(each)}
        step.kept.append(value)
    return value


# What it cannot be -------------------------------------------------------------------------------


def check(
    model: tf.keras.Model,
    strategy: str,
    options: StepOptions,
    own: Sequence[str] | None = None,
) -> None:
    """Refuses what is not exact with a step of the user's own.

    Args:
        own: which are; None tells it from the model's class.

    Raises:
        ModelError: its loss is scaled, or is a sum; or the strategy would divide the step itself.
    """
    own = own_steps(model) if own is None else own
    if not own:
        return
    found, mend = None, ""
    if options.changes_the_step or options.shards:
        found = f"accumulate_steps, recompute, shard or offload, and a {own[0]} of its own"
        mend = "Leave the option out, or move the custom part into compute_loss or a loss"
    elif any(
        keras.optimizers.inner_of(optimizer) is not optimizer for optimizer in optimizers_of(model)
    ):
        found = f"an optimizer with a loss scale, and a {own[0]} of its own"
        mend = "Use float32, or mixed_bfloat16, which needs no scale"
    elif losses.is_sum(model):
        found = f"a loss that is a sum over rows, and a {own[0]} of its own"
        mend = "Compile the model with a loss that is a mean"
    if found is not None:
        raise ModelError(
            f"a step that strategy '{strategy}' runs on each replica must be whole, in plain "
            "precision, and of means over rows, for the replicas' parts to add up",
            received=f"model '{model.name}' with {found}",
            mend=mend,
        )
