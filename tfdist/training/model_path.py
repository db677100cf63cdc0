"""Names of models, as ``--model`` takes them: "path/to/file.py:name" or "package.module:name"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from tfdist.errors import ModelError


def check(model: str) -> None:
    """Checks what can be checked without running the user's code.

    Raises:
        ModelError: not of the form, or the file does not exist.
    """
    place, colon, name = model.rpartition(":")
    if not colon or not name.isidentifier() or not place:
        raise ModelError(
            "a model must be given as FILE.py:NAME or MODULE:NAME, where NAME is a function that "
            "returns a compiled Keras model",
            received=repr(model),
            mend="Write for example --model model.py:model_fn",
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise ModelError("the file of a model must exist", received=f"no file {place}")


def load(model: str) -> Any:
    """Imports what ``model`` names.

    Raises:
        ModelError: there is no such module, or it has no such name.
    """
    check(model)
    place, _, name = model.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).resolve()
        # As `python file.py` does it: the file finds the modules beside it.
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # It is there, and imports what is not.
            raise ModelError(
                "the module of a model must exist", received=f"an error: {error}"
            ) from error
    if not hasattr(module, name):
        known = [
            key
            for key in vars(module)
            if not key.startswith("_") and callable(module.__dict__[key])
        ]
        raise ModelError(
            f"{place} must define {name}",
            received=f"a module that defines {', '.join(known) or 'nothing callable'}",
        )
    return getattr(module, name)
