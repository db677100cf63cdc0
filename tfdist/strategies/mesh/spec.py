"""What strategy "mesh" is, for all that never import its engine."""

from __future__ import annotations

from tfdist.strategies.spec import Spec

SPEC = Spec(
    name="mesh",
    path="tfdist.strategies.mesh.strategy:Mesh",
    summary="batches and weights divided over a mesh of devices (Mesh-TensorFlow); in one process, "
    "or on each rank of horovod or multi_worker",
    divides_model=True,
    engine="mesh-tensorflow",
    example={"batch": 1, "model": 2},
)
