"""A model that begins with the weights of a file, as of an earlier training."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.compat.keras import UNREADABLE
from tfdist.errors import ModelError, OptionError, in_one_line

if TYPE_CHECKING:
    import h5py

_SUFFIXES = (".keras", ".weights.h5")
# Groups of a file that are no weights. Keras would put an optimizer's back, its rate included.
_OF_TRAINING = ("optimizer", "metrics")


def check(path: str) -> None:
    """Checks a file of weights. Raises OptionError: there is none, or one of another kind."""
    if not Path(path).is_file() or not path.endswith(_SUFFIXES):
        raise OptionError(
            "init_weights must be a .keras or .weights.h5 file",
            received=path if Path(path).is_file() else f"no file {path}",
            mend="Give one that Keras wrote, such as model.keras of an earlier training",
        )


def with_weights(model_fn: Callable[[], Any], path: str) -> Callable[[], Any]:
    """Returns a function that returns the same model with the weights of a file.

    Raises, when it is called:
        ModelError: the model has no weights yet.
        OptionError: the weights are not those of such a model.
    """
    if not callable(model_fn):
        return model_fn  # The strategy says what is wrong with it.

    def made() -> Any:
        model = model_fn()
        if not getattr(model, "built", True):
            raise ModelError(
                "a model that begins with init_weights must be built",
                received=f"model '{model.name}', which is not",
                mend="Give it a keras.Input, or call build in the function of the model",
            )
        try:
            _load(model, path)
        except UNREADABLE as error:
            raise OptionError(
                f"init_weights must hold the weights of model '{model.name}', and no others",
                received=f"an error for {path}: {in_one_line(error)}",
                mend="Give a file of the same architecture, as model.save wrote it",
            ) from error
        return model

    return made


def _load(model: Any, path: str) -> None:
    """Raises ValueError where the model and the file do not have the same weights."""
    import h5py

    from tfdist.keras.trackables import optimizers_of
    from tfdist.training.model.lookup_vocabularies import follow_variables

    optimizers = optimizers_of(model)
    with tempfile.TemporaryDirectory(prefix="tfdist-weights-") as folder:
        given, own = Path(folder, "given.weights.h5"), Path(folder, "own.weights.h5")
        with h5py.File(_file_in(path, folder)) as source, h5py.File(given, "w") as target:
            for name in source:
                if not _is_of_training(model, name, optimizers):
                    source.copy(name, target)
            expected = _arrays(target)
        with warnings.catch_warnings():  # Of the optimizer, which has none there.
            warnings.simplefilter("ignore")
            model.load_weights(given)
        follow_variables(model)  # The buckets of a Discretization, which Keras 2 would not.
        model.save_weights(own)
        with h5py.File(own) as source:
            more = sorted(filter(_is_weight, expected - _arrays(source)))
    if more:  # Keras passes them by.
        raise ValueError(f"the model has no {', '.join(more)}")


def passed_by(model: Any, path: str) -> list[str]:
    """Returns the names of weights in a file that a model has no place for: Keras passes them by.

    All processes call it together.

    Args:
        path: of a file that the model has been given.
    """
    import h5py

    from tfdist.keras.trackables import optimizers_of

    if not path.endswith(_SUFFIXES):
        return []  # Keras compares an older file as a whole.
    of_training = [*optimizers_of(model), *getattr(model, "metrics", ())]

    def is_weight(name: str) -> bool:
        group = name.partition("/")[0]
        return _is_weight(name) and not _is_of_training(model, group, of_training)

    with tempfile.TemporaryDirectory(prefix="tfdist-weights-") as folder:
        with h5py.File(_file_in(path, folder)) as given:
            names = set(filter(is_weight, _arrays(given)))
        if len(names) == len(model.weights):  # Each has been found.
            return []
        own = Path(folder, "own.weights.h5")
        with contextlib.suppress(OSError):  # There may be no room for it.
            model.save_weights(own)
        if not own.exists() or not h5py.is_hdf5(own):  # The chief alone writes one.
            return []
        with h5py.File(own) as kept:
            known = set(map(_today, _arrays(kept)))
        return sorted(name for name in names if _today(name) not in known)


def _is_weight(name: str) -> bool:
    """Whether an array is one: models within a model may have been trained by themselves, and seeds
    are none."""
    return not {"seed_generator", *_OF_TRAINING} & set(name.split("/"))


def _today(name: str) -> str:
    """Returns a name of a file as Keras 3 writes it, which reads those of an earlier Keras."""
    return name.replace("_layer_checkpoint_dependencies", "layers")


def _file_in(path: str, folder: str) -> Path:
    """Returns the weights of a file: those within a .keras are put into ``folder``."""
    if not path.endswith(".keras"):
        return Path(path)
    with zipfile.ZipFile(path) as archive:
        return Path(archive.extract("model.weights.h5", folder))


def _is_of_training(model: Any, name: str, objects: list[Any]) -> bool:
    """Whether a group of a file is what a model has for its training alone.

    Args:
        objects: optimizers, say, that the model holds by names of its own.
    """
    held = vars(model).get(name)
    held = list(held.values()) if isinstance(held, dict) else held
    held = held if isinstance(held, (list, tuple)) else [held]
    known = {id(each) for each in objects}
    return name in _OF_TRAINING or (bool(held) and all(id(each) in known for each in held))


def _arrays(file: h5py.File) -> set[str]:
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if hasattr(item, "dtype") else None)
    return set(names)
