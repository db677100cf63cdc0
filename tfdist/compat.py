"""Imports of engines that need something done around them; a fault is named by its issue."""

from __future__ import annotations

import atexit
import gc
from types import ModuleType


def import_tensorflow() -> ModuleType:
    """Imports TensorFlow into a program of tfdist's own, which starts and ends a second earlier.

    What the import makes, and the graphs that are traced later, stays until the process ends.
    Python's garbage collector would look through all of it again and again while it comes, and once
    more at the end. A library leaves the collector of its user's program alone; a rank program is
    ours.

    Returns:
        The module ``tensorflow``, whose objects the collector leaves alone from now on.
    """
    gc.disable()
    try:
        import tensorflow
    finally:
        gc.enable()
    gc.freeze()
    atexit.register(gc.freeze)
    return tensorflow


def import_mesh_tensorflow() -> ModuleType:
    """Imports Mesh-TensorFlow 0.1.21 on a TensorFlow that has moved a function it looks for.

    tensorflow/mesh#392: ``ops.register_tensor_conversion_function`` went to
    ``tensor_conversion_registry`` in TensorFlow 2.14, and Mesh-TensorFlow is no longer maintained.

    Returns:
        The module ``mesh_tensorflow``.

    Raises:
        ImportError: it is not installed.
    """
    from tensorflow.python.framework import ops, tensor_conversion_registry

    if not hasattr(ops, "register_tensor_conversion_function"):
        ops.register_tensor_conversion_function = (
            tensor_conversion_registry.register_tensor_conversion_function
        )
    import mesh_tensorflow

    return mesh_tensorflow
