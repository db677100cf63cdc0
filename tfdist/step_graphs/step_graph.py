"""The operations of a traced train step, as TensorFlow runs them, for any batch.

TensorFlow inlines the functions of a step and simplifies it before it runs. The same is done here,
by its own optimizer of graphs, without running anything: variables are only named, and the batch
has the rows that are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.errors import ModelError

# Loops, and functions that TensorFlow chooses a kernel for when it runs, as a loop of its LSTM.
_UNSEEN = frozenset(
    ("While", "StatelessWhile", "LoopCond", "PartitionedCall", "StatefulPartitionedCall")
)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a step.

    Attributes:
        kind: of TensorFlow, such as "MatMul".
        device: such as "CPU:0".
        inputs: (number of the operation, its output) of each.
        after: numbers of operations that run before this one, without giving it anything.
        shapes: of the outputs; an unknown dimension counts 1.
        sizes: bytes of the outputs.
        attributes: those that the counting of operations reads.
        is_open: whether a number that it reads or gives has a dimension that is unknown.
    """

    name: str
    kind: str
    device: str
    inputs: tuple[tuple[int, int], ...]
    after: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    attributes: Mapping[str, Any]
    is_open: bool = False


def of(traced: Any, rows: int) -> list[Operation]:
    """Returns the operations of a step.

    Args:
        traced: the concrete function of a train step; its inputs are iterators.
        rows: of the batch that one iterator gives, where the trace leaves them open.

    Raises:
        ModelError: it has a loop, which is one operation, whose body and lists nobody sees.
    """
    import tensorflow as tf

    home = tf.zeros([]).device  # Where a step runs what has no device of its own.
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(_prepared(traced, rows, home), name="")
    optimized = _optimized(graph, traced)
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(optimized, name="")
    unseen = [each.name for each in graph.get_operations() if each.type in _UNSEEN]
    if unseen:
        raise ModelError(
            "a step that is planned must have no loops, as recurrent layers have",
            received=f"operation '{unseen[0]}', of which nothing is known before it runs",
            mend="Give recurrent layers unroll=True, and leave steps_per_execution out, or try the "
            "largest batch with `tfdist bench`",
        )
    return _listed(graph, home)


def _prepared(traced: Any, rows: int, home: str) -> Any:
    """Returns the graph of ``traced`` with ``rows`` rows, and variables that hold nothing."""
    definition = traced.graph.as_graph_def()
    held = variables_of(traced)
    for node in definition.node:
        variable = held.get(node.name)
        if variable is not None:
            node.op = "VarHandleOp"
            node.attr.clear()
            node.attr["dtype"].type = variable.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
            node.attr["shared_name"].s = node.name.encode()
            node.device = variable.device
    within = [node for each in definition.library.function for node in each.node_def]
    for node in (*definition.node, *within):
        if node.op == "If" and any("GetNextAsOptional" in given for given in node.input):
            _take_batch(node, definition)
        if node.op == "IteratorGetNext":
            for output, shape in enumerate(node.attr["output_shapes"].list.shape):
                if [dim.size for dim in shape.dim] == [2]:
                    # A share: else the sizes of microbatches, its parts, would stay open.
                    _settle(node.name, output, [rows, rows], definition)
                elif shape.dim and shape.dim[0].size == -1:
                    shape.dim[0].size = rows
    for node in definition.node:  # Those within functions lie where these are called.
        node.device = node.device or home
    return definition


def _take_batch(node: Any, definition: Any) -> None:
    """Lets replicas have their parts of a batch, where TensorFlow asks whether there are any."""
    resources = {each.name for each in definition.node if each.op == "Placeholder"}
    iterator = next(given for given in node.input if given in resources)
    replicas = len({given.strip("^") for given in node.input if "GetNextAsOptional" in given})
    types, shapes = (type(node.attr[name])() for name in ("Tout", "output_shapes"))
    types.CopyFrom(node.attr["Tout"])
    shapes.CopyFrom(node.attr["output_shapes"])
    for share in shapes.list.shape[-replicas:]:  # What a replica has of a batch comes last.
        share.dim[0].size = 2
    node.op = "IteratorGetNext"
    node.input[:] = [iterator]
    node.attr.clear()
    node.attr["output_types"].CopyFrom(types)
    node.attr["output_shapes"].CopyFrom(shapes)


def _settle(name: str, output: int, value: list[int], definition: Any) -> None:
    """Puts a constant in the place of an output of the operation called ``name``."""
    import tensorflow as tf

    constant = f"{name}_settled_{output}"
    named = {f"{name}:{output}": constant, f"{name}:components:{output}": f"{constant}:output:0"}
    for nodes in (definition.node, *(each.node_def for each in definition.library.function)):
        if all(node.name != name for node in nodes):
            continue
        for node in nodes:
            node.input[:] = [named.get(given, given) for given in node.input]
        made = nodes.add(name=constant, op="Const")
        made.attr["dtype"].type = tf.int64.as_datatype_enum
        made.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64))


def variables_of(traced: Any) -> dict[str, Any]:
    """Returns name of an input of the step's graph -> the variable that it is, on its device."""
    known = {
        id(each.handle): each
        for variable in traced.graph.variables
        for each in getattr(variable, "values", [variable])
    }
    captures = traced.graph.captures
    return {inner.op.name: known[id(outer)] for outer, inner in captures if id(outer) in known}


def short(device: str) -> str:
    """Returns the name of a device in its process, such as "CPU:0"."""
    return device.rpartition("device:")[2]


def _optimized(graph: Any, traced: Any) -> Any:
    import tensorflow as tf

    # No public name reaches the optimizer of graphs without running what it has optimized.
    from tensorflow.python.grappler import tf_optimizer

    described = tf.compat.v1.train.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
    ends = [tensor.name for tensor in traced.outputs]
    ends += [operation.name for operation in traced.graph.control_outputs]
    described.collection_def["train_op"].node_list.value.extend(ends)
    cpus = len(tf.config.list_logical_devices("CPU"))
    config = tf.compat.v1.ConfigProto(device_count={"CPU": cpus})
    return tf_optimizer.OptimizeGraph(config, described)


#: What tells a product's size beside its shapes.
_READ = ("transpose_a", "adj_x", "equation")


def _listed(graph: Any, home: str) -> list[Operation]:
    operations = graph.get_operations()
    number = {operation.name: index for index, operation in enumerate(operations)}
    places: dict[str, str] = {}
    found = []
    for each in operations:
        places[each.name] = _place(each, places, home)
        shapes = tuple(_shape(output) for output in each.outputs)
        attributes = each.node_def.attr
        found.append(
            Operation(
                name=each.name,
                kind=each.type,
                device=places[each.name],
                inputs=tuple((number[t.op.name], t.value_index) for t in each.inputs),
                after=tuple(number[before.name] for before in each.control_inputs),
                shapes=shapes,
                sizes=tuple(
                    math.prod(shape) * _element_bytes(output.dtype)
                    for shape, output in zip(shapes, each.outputs, strict=True)
                ),
                attributes={name: each.get_attr(name) for name in _READ if name in attributes},
                is_open=any(
                    tensor.dtype.is_floating and not tensor.shape.is_fully_defined()
                    for tensor in (*each.inputs, *each.outputs)
                ),
            )
        )
    return found


def _place(operation: Any, places: Mapping[str, str], home: str) -> str:
    """Returns the device of an operation, for those of its inputs.

    What reads a variable does so where it lies, and what inlining puts between functions hands on
    a tensor where that is.
    """
    handles = [t.op for t in operation.inputs if _is_variable(t)]
    if operation.type == "Identity" and not operation.device:
        handles = [tensor.op for tensor in operation.inputs]
    return places[handles[0].name] if handles else short(operation.device or home)


def _is_variable(tensor: Any) -> bool:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor.op.type == "VarHandleOp"


def _shape(output: Any) -> tuple[int, ...]:
    if output.shape.rank is None:
        return ()
    return tuple(1 if size is None else size for size in output.shape)


def _element_bytes(dtype: Any) -> int:
    """Resources and variants hold what is counted elsewhere, or not at all."""
    is_held = dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex
    return dtype.size if is_held else 0
