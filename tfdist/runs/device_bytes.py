"""The most bytes that lie on each device of a process at any time of a train step.

Logical CPUs share their memory, so what a process takes tells nothing of one of them. The step that
a fit has traced runs in a session instead, which notes for each operation its device, its times and
the buffers that it gives. It runs several times, since TensorFlow's threads take what is ready in
another order each time, and a device must have room for the worst. A buffer counts on its device
from there until the last operation that reads it there has ended, and one that is sent until it has
arrived. Variables count all the while. What kernels take for themselves within an operation is not
in it.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.runs import traced_step
from tfdist.step_graphs import step_graph

# Each in a session of its own, in which the order is rather the same. Of an MLP's eight steps three
# took more than the rest, by 6, 11 and 12 %.
_STEPS = 8


def of_a_step(model: Any, fit: Callable[[], Any]) -> dict[str, int]:
    """Returns device, as "CPU:0" -> bytes.

    Args:
        model: after its first step.
        fit: trains it; the first batch is taken for this.
    """
    traced, given = traced_step.traced(model, fit)
    steps, held = _run_noted(traced, given)
    live: collections.Counter[str] = collections.Counter()
    for noted in steps:
        for device in noted.step_stats.dev_stats:
            name = step_graph.short(device.device)
            live[name] = max(live[name], _most_live(noted, device.device))
    return dict(live + held)


def _run_noted(traced: Any, args: tuple[Any, ...]) -> tuple[list[Any], collections.Counter[str]]:
    """Runs steps in sessions; returns the notes of each, and device -> bytes of variables."""
    v1 = tf.compat.v1
    variables = step_graph.variables_of(traced)
    values = {name: variable.numpy() for name, variable in variables.items()}
    held: collections.Counter[str] = collections.Counter()
    for variable in {id(one): one for one in variables.values()}.values():
        held[step_graph.short(variable.device)] += variable.numpy().nbytes
    batches = _batches(traced, args)
    home = tf.zeros([]).device  # Where the step runs what has no device of its own.
    with tf.Graph().as_default(), tf.device(home):
        fed: dict[str, Any] = {}
        begun = []
        rows: dict[str, Any] = {}
        for batch, inputs in batches:
            # Constants of equal values would share one buffer.
            places = tf.nest.map_structure(lambda one: v1.placeholder(one.dtype, one.shape), batch)
            named = [place.name for place in tf.nest.flatten(places)]
            rows |= zip(named, tf.nest.flatten(batch), strict=True)
            # What is fed lies in memory of numpy, of which TensorFlow notes neither place nor size.
            copies = tf.nest.map_structure(lambda one: tf.raw_ops.DeepCopy(x=one), places)
            dataset = tf.data.Dataset.from_tensors(copies).repeat()
            specs = tf.nest.flatten(dataset.element_spec)
            kinds = {
                "output_types": [spec.dtype for spec in specs],
                "output_shapes": [spec.shape for spec in specs],
            }
            iterator = tf.raw_ops.IteratorV2(shared_name="", container="", **kinds)
            variant = tf.data.experimental.to_variant(dataset)
            begun.append(tf.raw_ops.MakeIterator(dataset=variant, iterator=iterator))
            if inputs[0].dtype == tf.resource:
                fed[inputs[0].name] = iterator
            else:
                taken = tf.raw_ops.IteratorGetNext(iterator=iterator, **kinds)
                fed |= {inner.name: one for inner, one in zip(inputs, taken, strict=True)}
        for name, value in values.items():
            with tf.device(variables[name].device):
                fed[f"{name}:0"] = tf.Variable(value, trainable=False).handle
        ends = [tensor.name for tensor in traced.outputs]
        ends += [operation.name for operation in traced.graph.control_outputs]
        fetched = tf.graph_util.import_graph_def(_placed_freely(traced), fed, ends, name="")
        cpus = len(tf.config.list_logical_devices("CPU"))
        asked = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE, output_partition_graphs=True)
        steps = [v1.RunMetadata() for _ in range(_STEPS)]
        for noted in steps:
            with v1.Session(config=v1.ConfigProto(device_count={"CPU": cpus})) as session:
                session.run([v1.global_variables_initializer(), *begun], rows)
                session.run(fetched)  # Once before, as TensorFlow optimizes it then.
                session.run(fetched, options=asked, run_metadata=noted)
    return steps, held


def _placed_freely(traced: Any) -> Any:
    """Returns the graph of a step whose iterators may lie on another device than in training."""
    definition = traced.graph.as_graph_def()
    within = [node for each in definition.library.function for node in each.node_def]
    for node in (*definition.node, *within):
        if "Iterator" in node.op or "Optional" in node.op:
            node.attr.pop("_class", None)
    return definition


def _batches(traced: Any, args: tuple[Any, ...]) -> list[tuple[Any, list[Any]]]:
    """Returns (a batch, the inputs of the step that give it) of each replica, or of the step."""
    own = traced.inputs[: len(traced.inputs) - len(traced.captured_inputs)]
    if own[0].dtype != tf.resource:
        return [(tuple(one.numpy() for one in tf.nest.flatten(args) if one is not None), own)]
    batch = next(args[0])
    read = [one for one in own if one.consumers()]
    if len(read) == 1:
        return [(tf.nest.map_structure(lambda each: each.numpy(), batch), read)]
    return [
        (tf.nest.map_structure(lambda each, n=number: each.values[n].numpy(), batch), [one])
        for number, one in enumerate(read)
    ]


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
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


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
