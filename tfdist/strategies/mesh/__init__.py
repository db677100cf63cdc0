"""Models too large for one device: Keras models on a Mesh-TensorFlow mesh of batch x model.

Shazeer et al. 2018, Mesh-TensorFlow, arXiv:1811.02084; the automatic layout is that of Shoeybi et
al. 2019, Megatron-LM, arXiv:1909.08053 (columns, then rows; heads; vocabulary).
"""

from __future__ import annotations

from tfdist.strategies.mesh.registry import UnsupportedLayerError, register_layer
from tfdist.strategies.spec import Spec

__all__ = ["UnsupportedLayerError", "register_layer"]


# Here, for all that never import its engine.
SPEC = Spec(
    name="mesh",
    path="tfdist.strategies.mesh.strategy:Mesh",
    summary="batches and weights divided over a mesh of devices (Mesh-TensorFlow); in one process, "
    "or on each rank of horovod or multi_worker",
    divides_model=True,
    takes_keras_3=True,
    engine="mesh-tensorflow",
    example={"batch": 1, "model": 2},
)
