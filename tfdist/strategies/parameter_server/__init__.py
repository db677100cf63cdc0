"""Weights on parameter servers, and workers that update them, each at its own pace."""

from tfdist.strategies.spec import Spec

# Here, for all that never import its engine.
SPEC = Spec(
    name="parameter_server",
    path="tfdist.strategies.parameter_server.strategy:ParameterServer",
    summary="weights on parameter servers, workers that do not wait for each other: asynchronous",
    launchers=("tasks",),
    takes_keras_3=True,
    has_servers=True,
    is_asynchronous=True,
    engine="parameter-server",
    sagemaker="parameter_server",
)
