"""Strategy "federated": clients train on their own records, a server averages, on TFF."""

from tfdist.strategies.spec import Spec

# Here, for all that never import its engine.
SPEC = Spec(
    name="federated",
    path="tfdist.strategies.federated.strategy:Federated",
    summary="clients train on their own records, a server averages (TensorFlow Federated), "
    "simulated",
    engine="tensorflow-federated",
    example={"clients_per_round": 2},
    takes_keras_3=True,
)
