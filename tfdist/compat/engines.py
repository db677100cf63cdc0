"""Imports of engines that were written for an older TensorFlow."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tfdist.compat.keras import VARIABLE
from tfdist.compat.versions import minor_version, tensorflow_version

# What TensorFlow Federated's imports name of estimators, and never use.
_ESTIMATORS = ("tensorflow_estimator", "tensorflow_privacy.privacy.estimators")


def import_horovod() -> ModuleType:
    """Imports Horovod's module for TensorFlow, if it was built for the TensorFlow that is here.

    One that was not may load all the same, and is called with the layouts of another library.

    Returns:
        The module ``horovod.tensorflow``.

    Raises:
        ImportError: it is not installed, or was built for another TensorFlow, or for none.
    """
    spec = importlib.util.find_spec("horovod")
    built = Path(spec.origin).with_name("metadata.json") if spec and spec.origin else None
    if built is not None and built.is_file():
        found, wanted = json.loads(built.read_text()).get("tensorflow"), tensorflow_version()
        if found is None or minor_version(found) != minor_version(wanted):
            built_for = f"TensorFlow {found}" if found else "no TensorFlow"
            raise ImportError(f"it was built for {built_for}, and this is TensorFlow {wanted}")
    import horovod.tensorflow as hvd

    return hvd


def import_mesh_tensorflow() -> ModuleType:
    """Imports Mesh-TensorFlow 0.1.21, which is no longer maintained.

    tensorflow/mesh#392: TensorFlow has moved ``ops.register_tensor_conversion_function`` to
    ``tensor_conversion_registry``. It has no ``tf.compat.v1.estimator`` any more; what
    Mesh-TensorFlow looks for in it is in ``tf.compat.v1.train`` too.

    Returns:
        The module ``mesh_tensorflow``.

    Raises:
        ImportError: it is not installed.
    """
    import tensorflow as tf
    from tensorflow.python.framework import ops, tensor_conversion_registry

    ops.register_tensor_conversion_function = (
        tensor_conversion_registry.register_tensor_conversion_function
    )
    tf.compat.v1.estimator = tf.compat.v1.train
    # With Keras 3 what is imported by this name is another module.
    importlib.import_module("tensorflow.compat.v1").estimator = tf.compat.v1.train
    import mesh_tensorflow

    return mesh_tensorflow


def import_tensorflow_federated() -> ModuleType:
    """Imports TensorFlow Federated 0.87.0, which asks for TensorFlow 2.14.

    It imports all of TensorFlow Privacy, whose estimators need a package that TensorFlow has no
    more (tensorflow/privacy#547). Nothing of them is called: names suffice.

    Returns:
        The module ``tensorflow_federated``.

    Raises:
        ImportError: it is not installed.
    """
    import tensorflow as tf

    with _chosen_keras(tf):
        if "tensorflow_federated" not in sys.modules and not hasattr(tf.compat.v1, "estimator"):
            finder = _Estimators()
            sys.meta_path.insert(0, finder)
            named = [tf, tf.compat.v1]
            for module in named:
                module.estimator = _Names("estimator")
            try:
                import tensorflow_federated
            finally:
                sys.meta_path.remove(finder)
                for module in named:
                    del module.estimator
        import tensorflow_federated

    return tensorflow_federated


@contextlib.contextmanager
def _chosen_keras(tf: ModuleType) -> Iterator[None]:
    """Keeps ``tf.keras``, here and in processes to come, what it is: tensorflow-model-optimization,
    which TFF imports, asks for Keras 2."""
    chosen, _ = os.environ.get(VARIABLE), tf.keras.Model  # Which settles it.
    try:
        yield
    finally:
        if chosen is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = chosen


class _Names(ModuleType):
    """A module in which every name is a class that does nothing."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Estimators(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers the imports of estimators."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(name == asked or name.startswith(f"{asked}.") for asked in _ESTIMATORS):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""
