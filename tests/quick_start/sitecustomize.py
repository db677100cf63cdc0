"""Has the thousand processes of the tests take two thirds of the time.

TensorFlow and Keras import pandas, SciPy, jax, scikit-learn and matplotlib where they are there,
for functions that few programs call: two of the five seconds that each process takes to start.
Here those modules are loaded as if there were none. What a test itself imports is there, as is all
that tfdist imports; a DataFrame is still taken, since pandas is asked for as soon as anyone has
imported it. Python imports this file by its name from PYTHONPATH, where tests/conftest.py puts its
folder.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import types
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location


class _LatePandas(types.ModuleType):
    """pandas as soon as anyone has imported it; before, nothing can be a DataFrame of it."""

    def __getattr__(self, name: str) -> object:
        if "pandas" not in sys.modules and name in ("Series", "DataFrame"):
            return type(name, (), {})
        return getattr(importlib.import_module("pandas"), name)


#: Module -> what it is loaded without, each with a way of its own for a user who lacks that, or
#: with what stands in for it.
_WITHOUT = {
    "tensorflow.lite.python.util": {"jax": None},
    "keras.src.visualization.plot_image_gallery": {"matplotlib": None},
    "keras.src.visualization.plot_bounding_box_gallery": {"matplotlib": None},
    "keras.src.wrappers.fixes": {"sklearn": None},
    "keras.src.wrappers.sklearn_wrapper": {"sklearn": None},
    "keras.src.wrappers.utils": {"sklearn": None},
    "keras.src.trainers.data_adapters.array_slicing": {"pandas": None},
}
for _keras in ("tensorflow.python.keras", "tf_keras.src", "keras.src"):  # Keras 2 of both lanes.
    _WITHOUT |= {
        f"{_keras}.engine.data_adapter": {"pandas": _LatePandas("pandas")},
        f"{_keras}.engine.training_v1": {"scipy": None},
        f"{_keras}.engine.training_arrays_v1": {"scipy": None},
        f"{_keras}.preprocessing.image": {"scipy": None},
    }


class _Loader(SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        hidden = {
            name: stands_in
            for name, stands_in in _WITHOUT[self.name].items()
            if name not in sys.modules
        }
        sys.modules.update(hidden)
        try:
            super().exec_module(module)
        finally:
            for name, stands_in in hidden.items():
                if sys.modules.get(name) is stands_in:
                    del sys.modules[name]


class _Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path) if name in _WITHOUT else None
        if found is None or found.origin is None:
            return None
        return spec_from_file_location(name, found.origin, loader=_Loader(name, found.origin))


sys.meta_path.insert(0, _Finder)

# To trace a step makes many objects that stay: looking through all of them for circles after every
# 700 new ones takes a sixth of a tiny training.
gc.set_threshold(50_000, 20, 20)

# How many are started, which the end of a run tells.
if (_started := os.environ.get("TFDIST_TESTS_STARTED")) and os.path.isfile(_started):
    with open(_started, "ab") as _file:
        _file.write(b".")

# Last: the program that this process would be may run in another one, see zygote.
if "TFDIST_TESTS_ZYGOTE" in os.environ:
    import zygote

    zygote.hand_over()
