"""Has the thousand processes of the tests start in two thirds of the time.

TensorFlow and Keras import pandas, SciPy, jax, scikit-learn and matplotlib where they are there,
for functions that few programs call: two of the five seconds that each process takes to start.
Here those modules are told that there are none. What a test itself imports is there, as is all that
tfdist imports; a DataFrame is still taken, since pandas is asked for as soon as anyone has imported
it. Python imports this file by its name from PYTHONPATH, where tests/conftest.py puts its folder.
"""

from __future__ import annotations

import builtins
import sys
import types

#: Who asks -> which packages it does without: each has its own way for a user who lacks them.
_WITHOUT = {
    "tensorflow.lite.python.util": {"jax"},
    "tensorflow.python.keras.engine.training_v1": {"scipy"},
    "tensorflow.python.keras.engine.training_arrays_v1": {"scipy"},
    "tf_keras.src.engine.training_v1": {"scipy"},
    "tf_keras.src.engine.training_arrays_v1": {"scipy"},
    "tf_keras.src.preprocessing.image": {"scipy"},
    "keras.src.engine.training_v1": {"scipy"},
    "keras.src.engine.training_arrays_v1": {"scipy"},
    "keras.src.preprocessing.image": {"scipy"},
    "keras.src.visualization.plot_image_gallery": {"matplotlib"},
    "keras.src.visualization.plot_bounding_box_gallery": {"matplotlib"},
    "keras.src.wrappers.fixes": {"sklearn"},
    "keras.src.wrappers.sklearn_wrapper": {"sklearn"},
    "keras.src.wrappers.utils": {"sklearn"},
    "keras.src.trainers.data_adapters.array_slicing": {"pandas"},
}
_ASKS_FOR_PANDAS = {"tf_keras.src.engine.data_adapter", "keras.src.engine.data_adapter"}


class _LatePandas(types.ModuleType):
    """pandas as soon as anyone has imported it; before, nothing can be a DataFrame of it."""

    def __getattr__(self, name: str) -> object:
        pandas = sys.modules.get("pandas")
        if pandas is not None or name not in ("Series", "DataFrame"):
            return getattr(pandas or _import("pandas"), name)
        return type(name, (), {})


_import = builtins.__import__


def _import_less(name, globals=None, locals=None, fromlist=(), level=0):
    asks = globals.get("__name__") if globals else None
    if level == 0 and asks is not None:
        if name == "pandas" and asks in _ASKS_FOR_PANDAS:
            return _LatePandas("pandas")
        package = name.partition(".")[0]
        if package in _WITHOUT.get(asks, ()) and package not in sys.modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return _import(name, globals, locals, fromlist, level)


builtins.__import__ = _import_less
