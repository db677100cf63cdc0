"""Names of models, as ``--model`` takes them: "path/to/file.py:name" or "package.module:name".

A name may give its function arguments, as in "model.py:model_fn(width=16)": whoever reads the name
then makes the same model. Those of functions that return callbacks are alike.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tfdist.errors import ModelError, package_missing

# The first place that can end so: texts among the arguments may look like one, too.
_WITH_ARGUMENTS = re.compile(r"(.+?):([^\W\d]\w*\(.*\))", re.DOTALL)


@dataclass(frozen=True)
class Kind:
    """What the function that a name stands for returns, in the words of errors."""

    what: str
    returned: str
    option: str
    example: str

    @property
    def rule(self) -> str:
        return f"{self.what} must be given as FILE.py:NAME or MODULE:NAME"


MODEL = Kind("a model", "a compiled Keras model", "--model", "model.py:model_fn")
#: The parameter of a model's function that takes a trial of Optuna's: a name gives it as a dict.
TRIAL = "trial"
CALLBACKS = Kind("callbacks", "a list of Keras callbacks", "--callbacks", "model.py:callbacks")


def parts(model: str) -> tuple[str, str]:
    """Returns the place of a model, a file or a module, and what it is called there.

    ("model.py", "model_fn(width=16)"), of "model.py:model_fn(width=16)".
    """
    found = _WITH_ARGUMENTS.fullmatch(model)
    if found is not None:
        return found[1], found[2]
    place, _, name = model.rpartition(":")
    return place, name


def with_arguments(model: str, arguments: Mapping[str, Any]) -> str:
    """Returns the name of a model whose function is called with ``arguments``, too.

    Args:
        arguments: name -> a number, a text, None, or lists and dicts of these.
    """
    place, called = parts(model)
    every = _arguments(called) | dict(arguments)
    given = ", ".join(f"{name}={value!r}" for name, value in every.items())
    return f"{place}:{called.partition('(')[0]}({given})"


def _arguments(called: str) -> dict[str, Any]:
    """Returns what is in the parentheses. Raises ValueError: no names with plain values."""
    if "(" not in called:
        return {}
    call = ast.parse(called, mode="eval").body
    is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    if not is_call or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("something else than NAME=VALUE")
    # Python refuses these when it compiles, and not when it parses.
    if len({each.arg for each in call.keywords}) < len(call.keywords):
        raise ValueError("a name twice")
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def check(model: str, kind: Kind = MODEL) -> None:
    """Checks what can be checked without running the user's code.

    Raises:
        ModelError: not of the form, or the file does not exist.
    """
    place, called = parts(model)
    if not called.partition("(")[0].isidentifier() or not place:
        raise ModelError(
            f"{kind.rule}, where NAME is a function that returns {kind.returned}",
            received=repr(model),
            mend=f"Write for example {kind.option} {kind.example}",
        )
    try:
        _arguments(called)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        name = called.partition("(")[0]
        raise ModelError(
            "arguments of a model's function must be names with plain values",
            received=f"{called}: {error}",
            mend=f"Write for example {name}(width=16, activation='relu'), the whole in quotes",
        ) from None
    if place.endswith(".py") and not Path(place).is_file():
        raise ModelError(
            f"the file of {kind.what} must exist",
            received=f"no file {place}",
            mend="Give its path from the current folder, or the whole one",
        )


def check_no_arguments(function: Any, name: str) -> None:
    """Checks how ``function`` is called. Raises ModelError: it cannot be without arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # Of some functions Python cannot tell.
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        each.name
        for each in parameters
        if each.default is inspect.Parameter.empty and each.kind not in optional
    ]
    if needed:
        raise ModelError(
            f"{name} must be a function that can be called without arguments",
            received=f"one that needs {', '.join(needed)}",
            mend="Give each parameter a default, or write a function without any around it",
        )


def of(model: Any, kind: Kind = MODEL) -> str:
    """Returns the name by which another process finds ``model``: a name, or a function.

    Raises:
        ModelError: no other process can import it, as a function of a notebook's cell.
    """
    if isinstance(model, str):
        check(model, kind)
        return model
    name = getattr(model, "__qualname__", "")
    module = sys.modules.get(getattr(model, "__module__", None) or "")
    if not callable(model) or getattr(module, name, None) is not model:
        found = f"{name or type(model).__name__!r}, which is not one of a module"
        raise _not_importable(found, kind)
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}"
    try:
        file = inspect.getsourcefile(model)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        raise _not_importable(f"{name} of a notebook or an interactive session", kind)
    return f"{file}:{name}"


def _not_importable(found: str, kind: Kind) -> ModelError:
    return ModelError(
        f"the function of {kind.what} must stand in a file or module, for other processes import "
        "it",
        received=found,
        mend="Write it into a file, as with %%writefile model.py, and give 'model.py:NAME'",
    )


def load(model: str, kind: Kind = MODEL, *, again: bool = True) -> Any:
    """Imports what ``model`` names, with the arguments that it gives.

    Args:
        again: whether a file that has been imported is run once more, as it may have changed.

    Raises:
        ModelError: there is no such module, or it has no such name, or not these parameters.
    """
    check(model, kind)
    place, called = parts(model)
    name = called.partition("(")[0]
    if place.endswith(".py"):
        path = Path(place).resolve()
        module = sys.modules.get(path.stem)
        if again or getattr(module, "__file__", None) != str(path):
            module = _run(path)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # It is there, and imports what is not.
            raise ModelError(
                f"the module of {kind.what} must exist",
                received=f"an error: {error}",
                mend="Install it, or give its file: FILE.py:NAME",
            ) from error
    if not hasattr(module, name):
        known = [
            k for k, value in vars(module).items() if not k.startswith("_") and callable(value)
        ]
        raise ModelError(
            f"{place} must define {name}",
            received=f"a module that defines {', '.join(known) or 'nothing callable'}",
            mend=f"Name one that it has, or write def {name}(): ... there",
        )
    arguments = _arguments(called)
    return _given(getattr(module, name), name, arguments) if arguments else getattr(module, name)


def _given(function: Any, name: str, arguments: dict[str, Any]) -> Any:
    """Returns the function that calls ``function`` with ``arguments``."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ModelError(
            f"{name} must be a function of the arguments that it is given",
            received=f"{', '.join(arguments)}: {error}",
            mend=f"Write def {name}({', '.join(arguments)}): ..., or give what it has",
        ) from None
    except ValueError:  # Of some functions Python cannot tell.
        pass
    if isinstance(arguments.get(TRIAL), dict):
        arguments = arguments | {TRIAL: _replayed(arguments[TRIAL])}
    return functools.partial(function, **arguments)


def _replayed(chosen: dict[str, Any]) -> Any:
    """Returns a trial of Optuna's that suggests what was chosen."""
    try:
        from optuna.trial import FixedTrial
    except ImportError as error:
        raise package_missing("optuna", "a model that takes a trial", "tune", error) from None
    return FixedTrial(chosen)


def _run(path: Path) -> ModuleType:
    # As `python file.py` does it: the file finds the modules beside it.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(path.stem, None)  # Half of it is none that was imported.
        raise
    return module
