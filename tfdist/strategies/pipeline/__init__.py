"""Pipeline stages with microbatches: a model too large for one device, in plain TensorFlow."""

from tfdist.strategies.spec import Spec

# Here, for all that never import its engine.
SPEC = Spec(
    name="pipeline",
    path="tfdist.strategies.pipeline.strategy:Pipeline",
    summary="layers in stages on several devices, microbatches through them; in one process, or on "
    "each rank of horovod or multi_worker",
    divides_model=True,
    takes_keras_3=True,
    engine="tensorflow",
    example={"stages": 2, "microbatches": 4},
)
