"""What every strategy is, and what the data-parallel ones have in common."""

from __future__ import annotations

import abc
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from tfdist.compat import uses_keras_3
from tfdist.errors import ModelError, OptionError, cannot_write, first_line, notice
from tfdist.topology import Topology
from tfdist.training.engine.options import check_count, picked

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.training.engine.binding import Binding
    from tfdist.training.feed.feed import Feed
    from tfdist.training.feed.training_data import TrainingData
    from tfdist.training.model.scaling import Scaling

# What Keras writes into the folder of a SavedModel.
_SAVED_MODEL = {
    *("saved_model.pb", "keras_metadata.pb", "fingerprint.pb", "variables", "assets"),
    "assets.extra",
}

_FILES_OF_KERAS_3 = (".keras", ".h5")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What ``Strategy.dataset`` is told of a source; see there."""

    global_batch_size: int
    training: bool = True
    seed: int = 0
    map_fn: Callable | None = None
    record_fn: Callable | None = None
    batched: bool | None = None
    pad_to: int | str | None = None
    bucket_by_length: bool | Sequence[int] = False


_T = TypeVar("_T")
ModelOrFn = "Callable[[], tf.keras.Model] | tf.keras.Model"


class Strategy(abc.ABC):
    """A way to train a Keras model. Used as a context manager.

    ``build`` and ``dataset`` are a matched pair: the ``fit`` of what ``build`` returns reads what
    ``dataset`` returns. Constructing a strategy touches nothing; ``start`` does.
    """

    name: ClassVar[str]
    #: Whether its batches may have several lengths.
    takes_lengths: ClassVar[bool] = True
    #: What ``build`` lets the layers of a model compute in; None leaves Keras' own policy.
    precision: str | None = None

    def start(self) -> None:  # noqa: B027
        """Imports the engine and takes the devices."""

    def close(self) -> None:  # noqa: B027
        """Gives back what ``start`` took."""

    @property
    def topology(self) -> Topology:
        """Where this process stands in the job."""
        return Topology()

    @property
    @abc.abstractmethod
    def num_replicas(self) -> int:
        """Replicas that share a global batch."""

    @property
    def scaling(self) -> Scaling:
        """The rule for the learning rate."""
        return self._scaling(self.num_replicas)

    def _take_scaling(self, lr_scaling: str | None, warmup_epochs: float) -> None:
        """Keeps what ``scaling`` is made of. Raises OptionError: there is no such rule."""
        from tfdist.training.model.scaling import Scaling

        self._scaling = partial(Scaling, lr_scaling, warmup_epochs)
        self._scaling(num_replicas=1)

    @property
    def approximations(self) -> tuple[str, ...]:
        """What in the options makes this strategy differ from one device; empty when exact."""
        return ()

    @abc.abstractmethod
    def build(self, model_fn: ModelOrFn) -> tf.keras.Model:
        """Returns a Keras model whose fit, evaluate, predict and save are distributed.

        Args:
            model_fn: a function without arguments that returns a compiled Keras model, or a
                compiled Functional or Sequential model. Where each replica holds the whole model,
                it need not be built: the first data that it is given does so.

        Raises:
            ModelError: not a model, not compiled, or not one this strategy can train.
        """

    def _assembled(self, binding: Binding, **engine: Any) -> tf.keras.Model:
        """Puts on a built model what this strategy trains it with; see ``assemble``."""
        from tfdist.training.assemble import assemble

        told = {"scaling": self.scaling, "strategy_name": self.name, "dataset": self.dataset}
        return assemble(binding, **told, **engine)

    def dataset(
        self,
        source: Any,
        *,
        global_batch_size: int,
        training: bool = True,
        seed: int = 0,
        map_fn: Callable | None = None,
        record_fn: Callable | None = None,
        batched: bool | None = None,
        pad_to: int | str | None = None,
        bucket_by_length: bool | Sequence[int] = False,
    ) -> TrainingData:
        """Returns what this strategy's fit, evaluate and predict read.

        Args:
            source: a folder of shards ("data/train"), arrays or pandas tables
                ``(x, y[, sample_weight])``, a ``tf.data.Dataset`` of records or of batches, a
                function that yields either, a ``keras.utils.Sequence``, or shards that a cloud
                delivers (``records.reading.stored.Stored``). Batches are taken apart into records.
            global_batch_size: rows of one step, over all replicas.
            training: whether to shuffle, anew in each epoch; evaluation reads in record order.
            seed: of the shuffling; the same on all ranks.
            map_fn: ``(x, y[, sample_weight]) -> (x, y[, sample_weight])`` on a batch.
            record_fn: the same on one record, before records become batches: an augmentation, or
                what brings images to one size. One with a parameter ``seed`` is given int32 [2]
                for ``tf.image.stateless_random_*``, the same for a record in an epoch on any number
                of replicas, and after resuming. ``tfdist.augment("flip,crop")`` returns one.
            batched: whether an element of a dataset or a generator is a batch; None finds out, and
                refuses where that cannot be told.
            pad_to: features of variable length are padded to the longest record of each global
                batch with "batch", or to a multiple of a number that holds it; None pads all
                batches to one length, that of the longest record or ``--max-length``.
            bucket_by_length: whether the batches of an epoch hold records of similar lengths; a
                list of rising lengths says which are similar. With ``pad_to``, for training.
        """
        return self._feed(source, self._checked(DataOptions(**picked(DataOptions, locals()))))

    def _checked(self, options: DataOptions) -> DataOptions:
        """Returns what ``dataset`` was told.

        Raises:
            OptionError: batches of several lengths, where steps are made for one shape.
        """
        said = {"pad_to": options.pad_to, "bucket_by_length": options.bucket_by_length or None}
        given = [f"{option}={value!r}" for option, value in said.items() if value is not None]
        if given and not self.takes_lengths:
            raise OptionError(
                f"strategy '{self.name}' must be given batches of one length, which its steps are "
                "made for",
                received=", ".join(given),
                mend="Leave it out and choose the length with `tfdist adopt DIR --max-length N`, "
                "or use single, mirrored, horovod or multi_worker",
            )
        return options

    def _feed(self, source: Any, options: DataOptions) -> Feed:
        """Returns what ``dataset`` does."""
        return make_feed(source, options, **self._share())

    def _share(self) -> dict[str, Any]:
        """Returns what of the records this process reads, as arguments of ``make_feed``."""
        return {}

    def from_chief(self, value: Any) -> Any:
        """Returns the chief's ``value`` on every rank, so that all decide alike."""
        return value

    def save(self, model: tf.keras.Model, path: str | os.PathLike) -> None:
        """Writes an ordinary Keras file. Every rank calls it, one writes, atomically."""
        save_atomically(model, path)

    def run(
        self,
        step: Callable[[Any], dict[str, Any]],
        data: TrainingData,
        *,
        model: tf.keras.Model,
        **options: Any,
    ) -> tf.keras.callbacks.History:
        """Trains by the body of a hand-written loop, which each replica runs on its rows.

        Gradients that it gives to an optimizer of the model are weighted by the replica's rows and
        added up, and numbers that it returns are those of the global batch: one device's, for
        every loss that is a mean over rows plus terms of weights. ``tfdist.reduce`` and
        ``tfdist.all_gather`` are for what it computes otherwise.

        Args:
            step: ``batch -> {name: number}``, with a ``tf.GradientTape`` and
                ``optimizer.apply_gradients`` in it; ``batch`` is (x[, y[, sample_weight]]).
            data: what ``dataset`` returned.
            model: what ``build`` returned; its optimizers, one or several, are attributes of it.
            options: those of ``Model.fit``: epochs, callbacks (``Checkpoints`` too),
                validation_data, verbose.

        Returns:
            What ``step`` returned, of the last step of each epoch.

        Raises:
            ModelError: another strategy than single, mirrored, horovod and multi_worker.
            OptionError: ``step`` is no function of a batch.
        """
        from tfdist.training.steps.custom_loop import run

        return run(step, data, model, self.name, **options)

    def _entered(self, engine: _T | None) -> _T:
        """Returns what ``start`` has made. Raises OptionError: it was not called."""
        if engine is None:
            raise OptionError(
                f"strategy '{self.name}' must be entered before it builds or reads",
                received="a call outside of its with block",
                mend=f"Write: with tfdist.strategy('{self.name}') as strategy:, and build, read "
                "and fit below it",
            )
        return engine

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def called(model_fn: Any, *, may_be_unbuilt: bool = False) -> tf.keras.Model:
    """Returns the compiled model that ``model_fn`` is or returns.

    Args:
        may_be_unbuilt: whether data can build it later; otherwise it is built.

    Raises:
        ModelError: it is neither, or the model is not compiled, or its input shape is unknown.
    """
    import tensorflow as tf

    from tfdist.keras.layers import is_built
    from tfdist.keras.losses import compiled_losses, listed_metrics
    from tfdist.training.engine.model_path import check_no_arguments
    from tfdist.training.model.compiled import check_optimizer
    from tfdist.training.model.deferred_build import can_be_built
    from tfdist.training.model.refusals import refuse_other_keras

    refuse_other_keras("a model", model_fn)
    model = model_fn
    if not isinstance(model_fn, tf.keras.Model):
        if not callable(model_fn):
            raise ModelError(
                "a model must be given as a function that returns it, or as a compiled Keras model",
                received=f"an object of type {type(model_fn).__name__}",
                mend="Write def model_fn(): ... return model",
            )
        name = getattr(model_fn, "__name__", "model_fn")
        check_no_arguments(model_fn, name)
        model = model_fn()
        refuse_other_keras("a model", model)
        if not isinstance(model, tf.keras.Model):
            raise ModelError(
                f"{name} must return a compiled Keras model",
                received=f"an object of type {type(model).__name__}",
                mend="End it with: return model",
            )
    if getattr(model, "optimizer", None) is None:
        raise ModelError(
            "a model must be compiled before a strategy can train it",
            received=f"model '{model.name}' without an optimizer",
            mend="Call model.compile(optimizer, loss, metrics=...) in model_fn",
        )
    check_optimizer(model)
    refuse_other_keras("a loss", *tf.nest.flatten(compiled_losses(model)))
    refuse_other_keras("a metric", *listed_metrics(model))
    if not is_built(model) and not (may_be_unbuilt and can_be_built(model)):
        raise ModelError(
            "a model must know its input shape before a strategy can build it",
            received=f"model '{model.name}', not built",
            mend="Begin it with keras.Input(shape), or call model.build(input_shape)"
            + (", or model(keras.Input(shape))" if uses_keras_3() else "")
            + (
                ", or use strategy 'mirrored', 'horovod' or 'multi_worker', which build it from "
                "data"
                if can_be_built(model)
                else ""
            ),
        )
    return model


def made_here(model_fn: Any, *, may_be_unbuilt: bool = False) -> tf.keras.Model:
    """Returns what ``called`` does, made in the current scope: of a model that was given a copy."""
    model = called(model_fn, may_be_unbuilt=may_be_unbuilt)
    return clone(model) if model is model_fn else model


def clone(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a copy of a compiled Functional or Sequential model, made in the current scope.

    Its optimizer goes on where that of the model is.

    Raises:
        ModelError: the model is of a class of its own, or compiled with objects Keras cannot copy.
    """
    import tensorflow as tf

    from tfdist.keras.layers import held_by, take_trainable
    from tfdist.keras.optimizer_copies import compile_config_of, go_on
    from tfdist.keras.seeds import seeds_in
    from tfdist.keras.trackables import unknown_variables
    from tfdist.training.model.lookup_vocabularies import take_adapted

    try:
        copy = tf.keras.models.clone_model(model)
        take_trainable(copy, model)
        copy.set_weights(model.get_weights())
        take_adapted(copy, model)
        copy.compile_from_config(compile_config_of(model))
        if getattr(copy, "optimizer", None) is None:  # Keras calls no compile of a user's own.
            raise ValueError("its class has a compile of its own")
        # Keras 3 counts neither among the weights. Those in `own` are made by a user: not copied.
        own = {id(variable) for variable in held_by(model, tf.Variable)}
        for kind in (partial(unknown_variables, shared=True), seeds_in):
            olds, news = [one for one in kind(model) if id(one) not in own], kind(copy)
            if [one.shape for one in olds] == [one.shape for one in news]:
                for old, new in zip(olds, news, strict=True):
                    new.assign(tf.convert_to_tensor(old))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(
            "a model that was made outside of this strategy must be one that Keras can copy",
            received=f"model '{model.name}': {first_line(error)}",
            mend="Give a function that makes and compiles the model instead",
        ) from error
    pairs = list(zip(model.weights, copy.weights, strict=True))
    go_on(model.optimizer, copy.optimizer, pairs, copy.trainable_variables)
    return copy


def check_folder(path: str | os.PathLike) -> None:
    """Raises:
    OptionError: the folder that a model is to be saved in does not exist, or Keras 3 would not
        write a file of that name.
    """
    target = Path(path)
    if uses_keras_3() and target.suffix not in _FILES_OF_KERAS_3:
        raise OptionError(
            "a saved model must be a file .keras or .h5 with Keras 3",
            received=str(target),
            mend=f"Name it {target.with_suffix('.keras').name}, or write a SavedModel: "
            "model.export(folder)",
        )
    if not target.parent.is_dir():
        raise OptionError(
            "the folder of a saved model must exist",
            received=f"no folder {target.parent}",
            mend="Make it first",
        )


def _check_is_model(target: Path) -> None:
    """Raises:
    OptionError: a folder is in the place of the model, and holds more than a saved model.
    """
    more = {path.name for path in target.iterdir()} - _SAVED_MODEL if target.is_dir() else set()
    if more:
        raise OptionError(
            "a saved model must replace nothing but a saved model",
            received=f"{target} with {', '.join(sorted(more)[:3])}",
            mend="Choose another path",
        )


def _warn_of_what_is_not_saved(model: tf.keras.Model, target: Path) -> None:
    from tfdist.keras.trackables import unsaved_variables

    if lost := unsaved_variables(model):
        names = ", ".join(variable.name.partition(":")[0] for variable in lost[:3])
        notice(
            f"warning: {target} does not hold what layers keep in a tf.Variable, which "
            f"Keras 3 leaves out of its files ({len(lost)}: {names}): a model that is loaded from "
            "it begins with new ones. Give the layer save_own_variables and load_own_variables",
        )


def save_atomically(model: tf.keras.Model, path: str | os.PathLike) -> None:
    """Writes ``model`` as Keras would, under a temporary name beside ``path``, then renames it.

    Raises:
        WriteError: it cannot be written, as on a full disk; what stood there before still does.
    """
    import tensorflow as tf

    target = Path(path)
    check_folder(target)
    _check_is_model(target)
    _warn_of_what_is_not_saved(model, target)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
            written = Path(folder) / target.name
            model.save(written)
            before = Path(folder) / "before"
            if target.is_dir():  # No folder takes the place of another: the old one steps aside.
                os.replace(target, before)
            try:
                os.replace(written, target)
            except BaseException:
                if before.is_dir():
                    os.replace(before, target)
                raise
    except (OSError, tf.errors.OpError) as error:
        raise cannot_write(target, error) from error


def make_feed(
    source: Any,
    options: DataOptions,
    *,
    parts: int = 1,
    part: int = 0,
    splits: int = 1,
    speeds: tuple[float, ...] | None = None,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> Feed:
    """Returns the feed of a data-parallel strategy; see ``Strategy.dataset``.

    Args:
        speeds: see ``Collective``; of data to train on.
        gather: see ``Collective.gather``; used where hosts hold different records.
    """
    from tfdist.records.format.pad_to import padding_of
    from tfdist.records.reading.reader import open_records
    from tfdist.training.feed.division import Held
    from tfdist.training.feed.feed import Feed

    size = options.global_batch_size
    check_count("global_batch_size", size)
    if options.bucket_by_length and not options.training:
        raise OptionError(
            "bucket_by_length must be said of training data alone, as others are read in order",
            received="training=False",
            mend="Leave bucket_by_length out; pad_to counts here, too",
        )
    records = open_records(
        source,
        map_fn=options.map_fn,
        record_fn=options.record_fn,
        batched=options.batched,
        padding=padding_of(options.pad_to, options.bucket_by_length),
    )
    if records.note is not None and part == 0:
        print(f"tfdist: {records.note}; a step takes {size} of them", flush=True)
    if records.is_repeated and parts > 1 and part == 0:
        print(
            "tfdist: every rank runs the dataset up to its own records, those of others too; "
            "shards of `tfdist shard`, or arrays that only maps follow, divide that work",
            flush=True,
        )
    held = None
    if records.readers is not None:
        reader, readers = records.readers
        start, stop = (records.num_records * r // readers for r in (reader, reader + 1))
        held = Held(start, tuple(gather(stop - start)))
    return Feed(
        records=records,
        held=held,
        global_batch_size=size,
        parts=parts,
        part=part,
        splits=splits,
        speeds=speeds if options.training else None,
        shared=parts * splits > 1,
        shuffle=options.training,
        seed=options.seed,
    )
