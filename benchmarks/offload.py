"""``offload`` between two devices: the most bytes that lie on one of them, and what a step costs.

Two logical CPUs play an accelerator and its host. They share their memory, so what the process
takes tells nothing. The step that tfdist has traced runs once in a session that notes for each
operation its device, its times and the buffers that it gives. A buffer counts on the accelerator
from there until the last operation there that reads it has ended, and one that is sent until it
has arrived. What kernels take for themselves within an operation is not in it.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from typing import Any, NamedTuple

from benchmarks import apart

_apart = functools.partial(apart.call, "benchmarks.offload")
_WIDTH, _DEPTH, _ROWS = 512, 16, 4096
_ACCELERATOR = "CPU:1"


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Returns rows of work, baseline, ours, ratio and target: MB, and seconds, without and with."""
    rows = []
    for name, options, batch, target in (
        ("offload=activations", {"offload": "activations"}, _ROWS, 2.0),
        ("offload=optimizer", {"offload": "optimizer"}, _ROWS // 16, 1.5),
    ):
        batch = batch // 8 if quick else batch
        work = f"{name}, {_DEPTH} layers of {_WIDTH}, {batch} rows"
        kept, ours = (_apart("bytes_there", options=given, rows=batch) for given in ({}, options))
        rows.append(_row(f"MB on the accelerator, {work}", kept / 1e6, ours / 1e6, target))
        times = _apart("seconds", options=options, rows=batch, steps=3 if quick else 15)
        rows.append(_row(f"seconds of that step, {work}", *times, None))
    return rows


def _row(work: str, baseline: float, ours: float, target: float | None) -> dict[str, Any]:
    return {
        "work": work,
        "baseline": round(baseline, 3),
        "ours": round(ours, 3),
        "ratio": round(baseline / ours, 3),
        "target": target,
    }


def bytes_there(options: dict[str, Any], rows: int) -> int:
    """Returns the most bytes on the accelerator at any time of a step, variables included."""
    import numpy as np
    import tensorflow as tf

    x = np.ones((rows, _WIDTH), np.float32)
    _two_devices()
    with tf.device(_ACCELERATOR):
        model = _fitted(options, x)
        step = tf.function(lambda x: model.train_step((x, x))["loss"])
        traced = step.get_concrete_function(tf.TensorSpec(x.shape))
    noted, held = _run_noted(traced, x)
    return held + _most_live(noted, _ACCELERATOR)


def _run_noted(traced: Any, x: Any) -> tuple[Any, int]:
    """Runs a step in a session; returns its notes and the bytes of variables on the accelerator."""
    import tensorflow as tf

    v1 = tf.compat.v1
    variables = {id(own.handle): (own.device, own.numpy()) for own in traced.graph.variables}
    held = sum(at.endswith(_ACCELERATOR) * value.nbytes for at, value in variables.values())
    with tf.Graph().as_default(), tf.device(_ACCELERATOR):
        fed = v1.placeholder(tf.float32, x.shape)
        given: dict[str, Any] = {traced.inputs[0].name: fed}
        for outer, inner in traced.graph.captures:
            at, value = variables[id(outer)]
            with tf.device(at):
                given[inner.name] = tf.Variable(value, trainable=False).handle
        (loss,) = tf.graph_util.import_graph_def(
            traced.graph.as_graph_def(), given, [traced.outputs[0].name], name=""
        )
        config = v1.ConfigProto(device_count={"CPU": 2})
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            session.run(loss, {fed: x})
            noted = v1.RunMetadata()
            asked = v1.RunOptions(
                trace_level=v1.RunOptions.FULL_TRACE, output_partition_graphs=True
            )
            session.run(loss, {fed: x}, asked, noted)
    return noted, held


class _Ran(NamedTuple):
    """When an operation began and ended, ns; and its outputs' (address, bytes)."""

    began: int
    ended: int
    buffers: dict[int, tuple[int, int]]


def _most_live(noted: Any, device: str) -> int:
    """Returns the most bytes that operations' outputs held on ``device`` at any time."""
    ran: dict[str, _Ran] = {}
    there: set[str] = set()
    for of_device in noted.step_stats.dev_stats:
        for node in of_device.node_stats:
            began = node.all_start_nanos
            given = {o.slot: o.tensor_description.allocation_description for o in node.output}
            buffers = {slot: (one.ptr, one.requested_bytes) for slot, one in given.items()}
            ran[node.node_name] = _Ran(began, began + node.all_end_rel_nanos, buffers)
            if of_device.device.endswith(device):
                there.add(node.node_name)
    nodes = {node.name: node for graph in noted.partition_graphs for node in graph.node}
    nodes = {name: node for name, node in nodes.items() if name in ran}
    pairs: dict[bytes, dict[str, str]] = {}
    for node in nodes.values():
        if node.op in ("_Send", "_Recv"):
            pairs.setdefault(node.attr["tensor_name"].s, {})[node.op] = node.name
    arrives = {pair["_Send"]: pair["_Recv"] for pair in pairs.values() if len(pair) == 2}
    leaves = {back: out for out, back in arrives.items()}
    last_use = _last_use(nodes, ran, arrives)
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for name in there & nodes.keys():
        if nodes[name].op in ("VarHandleOp", "ReadVariableOp"):
            continue  # Variables are counted by themselves.
        # What receives waits from the beginning of the step, and has nothing yet.
        began = ran[leaves.get(name, name)].began
        for slot, (address, size) in ran[name].buffers.items():
            ended = max(ran[name].ended, last_use.get((name, slot), 0))
            spans.setdefault(address, []).append((began, ended, size))
    changes: list[tuple[int, int]] = []
    for of_address in spans.values():
        for began, ended, size in _merged(of_address):
            changes += [(began, size), (ended, -size)]
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def _last_use(
    nodes: dict[str, Any], ran: dict[str, _Ran], arrives: dict[str, str]
) -> dict[tuple[str, int], int]:
    """Returns (operation, output) -> when the last operation that reads it has ended."""
    found: dict[tuple[str, int], int] = {}
    for name, node in nodes.items():
        until = max(ran[name].ended, ran[arrives.get(name, name)].ended)
        for given in node.input:
            if not given.startswith("^"):
                source, _, slot = given.partition(":")
                key = (source, int(slot or 0))
                found[key] = max(found.get(key, 0), until)
    return found


def _merged(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Joins those that overlap: one buffer, which one operation hands to another."""
    joined: list[tuple[int, int, int]] = []
    for began, ended, size in sorted(spans):
        if joined and began <= joined[-1][1]:
            before = joined[-1]
            joined[-1] = (before[0], max(before[1], ended), max(before[2], size))
        else:
            joined.append((began, ended, size))
    return joined


def _two_devices() -> None:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def _fitted(options: dict[str, Any], x: Any) -> Any:
    """Returns a model after its first step, when slots lie where they are to."""
    import tensorflow as tf

    import tfdist

    def stack() -> Any:
        hidden = [tf.keras.layers.Dense(_WIDTH, "gelu") for _ in range(_DEPTH)]
        model = tf.keras.Sequential([tf.keras.Input((_WIDTH,)), *hidden])
        model.compile(tf.keras.optimizers.Adam(1e-4), "mse")
        return model

    model = tfdist.strategy("single", **options).build(stack)
    model.fit(x, x, batch_size=len(x), verbose=0)
    return model


def seconds(options: dict[str, Any], rows: int, steps: int) -> list[float]:
    """Returns the median seconds of a step without and with ``options``, taken in turns."""
    import numpy as np
    import tensorflow as tf

    x = np.ones((rows, _WIDTH), np.float32)
    _two_devices()
    times: list[list[float]] = [[], []]
    with tf.device(_ACCELERATOR):
        models = [_fitted(given, x) for given in ({}, options)]
        train = [model.make_train_function() for model in models]
        batches = [iter(tf.data.Dataset.from_tensors((x, x)).repeat()) for _ in models]
        for number in range(steps + 2):
            for which in (0, 1):
                start = time.perf_counter()
                train[which](batches[which])["loss"].numpy()
                if number >= 2:
                    times[which].append(time.perf_counter() - start)
    return [statistics.median(each) for each in times]


if __name__ == "__main__":
    apart.answer((bytes_there, seconds))
