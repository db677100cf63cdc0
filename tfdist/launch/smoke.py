"""One engine in a process of its own: ``python -m tfdist.launch.smoke ENGINE [--run]``.

Imports the engine and reports "imported" to the supervisor; with ``--run`` takes one real step on
two workers, checks its result, and reports "ran".
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from tfdist import topology
from tfdist.compat import (
    import_horovod,
    import_mesh_tensorflow,
    import_tensorflow,
    import_tensorflow_federated,
)
from tfdist.launch import events, programs


def _import_tensorflow() -> dict:
    tf = import_tensorflow()
    return {"gpus": [device.name for device in tf.config.list_physical_devices("GPU")]}


def _take_a_gradient() -> str:
    import tensorflow as tf

    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x * x)
    gradient = tape.gradient(loss, x).numpy().tolist()
    assert gradient == [2.0, 4.0], gradient
    return "one gradient on one device"


def _sum_over_cpus() -> str:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )

    @tf.function
    def numbers() -> Any:
        return tf.distribute.get_replica_context().replica_id_in_sync_group + 1

    total = strategy.reduce("SUM", strategy.run(numbers), axis=None).numpy()
    assert total == 3, total
    return "sum over two logical CPUs"


def _ask_mpirun() -> dict:
    mpirun = programs.find("mpirun", "the MPI controller", os.environ)
    asked = subprocess.run(
        [mpirun, "--version"],
        env=programs.rank_environment(os.environ),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return {"version": asked.stdout.split("\n")[0].split()[-1]}


def _count_ranks() -> str:
    size = topology.current().world_size
    assert size == 2, size
    return "two ranks started by mpirun"


def _import_horovod() -> dict:
    import_tensorflow()
    hvd = import_horovod()

    built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": bool(hvd.nccl_built())}
    return {"note": "built with " + ", ".join(name for name, yes in built.items() if yes)}


def _sum_over_ranks() -> str:
    hvd = import_horovod()
    import tensorflow as tf

    hvd.init()
    total = hvd.allreduce(tf.constant(hvd.rank() + 1), op=hvd.Sum).numpy()
    assert total == 3, total
    hvd.shutdown()
    return "all-reduce over two MPI ranks"


def _train_one_step(name: str, told: str = "one step; replicas: {}") -> str:
    """On one batch of two rows, divided or not: the weight must go from 1 to 0.8.

    Args:
        told: what is told of it, with a place for the number of replicas.
    """
    import numpy as np
    import tensorflow as tf

    from tfdist.strategies import strategy

    with strategy(name) as engine:  # Workers and servers of a chief stay within.
        inputs = tf.keras.Input((1,))
        model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, use_bias=False)(inputs))
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        model = engine.build(model)
        model.set_weights([np.ones((1, 1))])
        data = np.ones((2, 1), np.float32), np.zeros((2, 1), np.float32)
        model.fit(engine.dataset(data, global_batch_size=2), verbose=0)
        weight = model.get_weights()[0].item()
        assert abs(weight - 0.8) < 1e-6, weight
        return told.format(engine.num_replicas)


def _import_strategy(name: str) -> dict:
    """Of a strategy that nothing here knows more of."""
    from tfdist.strategies import strategy_class

    found = _import_tensorflow()
    strategy_class(name)
    return found


def _import_another(engine: Callable[[], Any]) -> dict:
    import_tensorflow()
    engine()
    return {}


def _multiply_on_mesh() -> str:
    import numpy as np
    import tensorflow as tf

    mtf = import_mesh_tensorflow()
    x, w = np.ones([2, 3], np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "smoke")
        rows, inner, columns = (
            mtf.Dimension(*pair) for pair in (("rows", 2), ("inner", 3), ("columns", 4))
        )
        product = mtf.einsum(
            [
                mtf.import_tf_tensor(mesh, tf.constant(x), mtf.Shape([rows, inner])),
                mtf.import_tf_tensor(mesh, tf.constant(w), mtf.Shape([inner, columns])),
            ],
            output_shape=mtf.Shape([rows, columns]),
        )
        devices = mtf.placement_mesh_impl.PlacementMeshImpl(
            "batch:1;model:2", "columns:model", ["cpu:0", "cpu:1"]
        )
        lowered = mtf.Lowering(graph, {mesh: devices}).export_to_tf_tensor(product)
        config = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
        with tf.compat.v1.Session(config=config) as session:
            result = session.run(lowered)
    assert np.array_equal(result, x @ w), result
    return "a matrix product on a 1x2 mesh of logical CPUs"


def _sum_over_clients() -> str:
    import numpy as np
    import tensorflow_federated as tff

    from tfdist.strategies.federated.engine import Engine

    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def total(values: Any) -> Any:
        return tff.federated_sum(values)

    engine = Engine()  # TFF's own would leave its worker behind.
    try:
        with engine.active():
            result = total([1, 2])
    finally:
        engine.close()
    assert result == 3, result
    return "a federated sum over two clients"


#: Engine -> what imports it and tells of it, and what takes a step and says which.
_ENGINES: dict[str, tuple[Callable[[], dict], Callable[[], str]]] = {
    "tensorflow": (_import_tensorflow, _take_a_gradient),
    "mirrored": (_import_tensorflow, _sum_over_cpus),
    "openmpi": (_ask_mpirun, _count_ranks),
    "horovod": (_import_horovod, _sum_over_ranks),
    "multi-worker": (
        _import_tensorflow,
        partial(_train_one_step, "multi_worker", "one step of two workers"),
    ),
    "parameter-server": (
        _import_tensorflow,
        partial(
            _train_one_step,
            "parameter_server",
            "one step of two workers, on one parameter server",
        ),
    ),
    "mesh-tensorflow": (partial(_import_another, import_mesh_tensorflow), _multiply_on_mesh),
    "tensorflow-federated": (
        partial(_import_another, import_tensorflow_federated),
        _sum_over_clients,
    ),
}


def main() -> None:
    name = sys.argv[1]
    of_strategy = partial(_import_strategy, name), partial(_train_one_step, name)
    load, run = _ENGINES.get(name, of_strategy)
    events.emit({"event": "imported", **load()})
    if "--run" in sys.argv[2:]:
        events.emit({"event": "ran", "what": run()})


if __name__ == "__main__":
    main()
