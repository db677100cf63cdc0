"""A model that begins with the weights of a file, as of an earlier training."""

from __future__ import annotations

import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.errors import ModelError, OptionError

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
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise OptionError(
                f"init_weights must hold the weights of model '{model.name}', and no others",
                received=f"an error for {path}: {' '.join(str(error).split())[:300]}",
                mend="Give a file of the same architecture, as model.save wrote it",
            ) from error
        return model

    return made


def _load(model: Any, path: str) -> None:
    """Raises ValueError where the model and the file do not have the same weights."""
    import h5py

    from tfdist.keras.trackables import optimizers_of
    from tfdist.training.model.lookup_vocabularies import follow_variables

    optimizers = {id(one) for one in optimizers_of(model)}

    def is_of_training(name: str) -> bool:
        held = vars(model).get(name)
        held = list(held.values()) if isinstance(held, dict) else held
        held = held if isinstance(held, (list, tuple)) else [held]
        return name in _OF_TRAINING or (bool(held) and all(id(each) in optimizers for each in held))

    with tempfile.TemporaryDirectory(prefix="tfdist-weights-") as folder:
        file, given, own = (
            Path(path),
            Path(folder, "given.weights.h5"),
            Path(folder, "own.weights.h5"),
        )
        if path.endswith(".keras"):
            with zipfile.ZipFile(path) as archive:
                file = Path(archive.extract("model.weights.h5", folder))
        with h5py.File(file) as source, h5py.File(given, "w") as target:
            for name in source:
                if not is_of_training(name):
                    source.copy(name, target)
            expected = _arrays(target)
        with warnings.catch_warnings():  # Of the optimizer, which has none there.
            warnings.simplefilter("ignore")
            model.load_weights(given)
        follow_variables(model)  # The buckets of a Discretization, which Keras 2 would not.
        model.save_weights(own)
        with h5py.File(own) as source:
            more = sorted(expected - _arrays(source))
    if more:  # Keras passes them by.
        raise ValueError(f"the model has no {', '.join(more)}")


def _arrays(file: h5py.File) -> set[str]:
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if hasattr(item, "dtype") else None)
    return set(names)
