"""What an engine needs changed elsewhere before it works; each change names the upstream issue."""

from __future__ import annotations


def import_mesh_tensorflow():
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
