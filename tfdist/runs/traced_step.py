"""A strategy's own train step, traced and not run, and what its graph tells of a step's needs."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist
from tfdist.errors import ModelError, OptionError
from tfdist.keras.layers import replaced
from tfdist.keras.losses import compiled_losses
from tfdist.planning.needs import Needs
from tfdist.step_graphs import live_bytes, step_graph
from tfdist.step_graphs.kernel_flops import flops_of
from tfdist.strategies import spec_of
from tfdist.strategies.data_parallel import DataParallel
from tfdist.strategies.mirrored import make_logical_cpus
from tfdist.strategies.unconnected_rank import UnconnectedRank
from tfdist.training.layers.losses import name_of
from tfdist.training.steps.row_probe_rows import made_up

# Where offload moves something from, if it does: the host's CPU is CPU:0.
_HOME = "CPU:1"
# Times the batch that is planned for: with few rows the peak is that of gradients, and does not
# grow; two large ones tell how it grows.
_TIMES = (1, 8, 16)
# Of a mesh, whose trace fixes its rows, so that each batch is made.
_TIMES_OF_MESH = (1, 2, 4)
# What a line may miss of a traced peak: more, and the peak has another cause.
_MISSES = 0.01


class _Traced(Exception):
    """Ends a fit whose step is traced."""


def needs_of(
    model_fn: Callable[[], Any],
    name: str,
    options: Mapping[str, Any],
    devices: int,
    rows: int,
    threads: int,
) -> Needs:
    """Returns what a step of ``model_fn`` on a strategy needs.

    Of a strategy with ``replicas`` one rank is traced, on its share of the rows; of one with
    parameter servers a worker, which pulls the weights for a step and has no slots.

    Args:
        rows: of the global batch.
        threads: that run operations, see ``live_bytes.most_on_each``.

    Raises:
        TfdistError: the strategy refuses the model, or its options.
    """
    devices = options.get("devices", devices) if name == "mirrored" else devices
    strategy = _strategy(name, options, devices)
    with _home(strategy, options), strategy:
        model = strategy.build(model_fn)
        _check_has_graph(model)
        model.jit_compile = False  # XLA's step would be one operation.
        home = step_graph.short(tf.zeros([]).device)
        is_divided = spec_of(name).divides_model
        of_each = len(tf.config.list_logical_devices("CPU")) if is_divided else 1
        ranks = max(1, devices // of_each) if options.get("replicas") or not is_divided else 1
        share = math.ceil(rows / ranks) if is_divided else rows
        times = _TIMES_OF_MESH if name == "mesh" else _TIMES
        batches = [each * share for each in times]
        # Rows that are traced are made, and a large batch may not fit here.
        alike = [[rows] for rows in batches] if name == "mesh" else [batches]
        steps = [each for own in alike for each in _of_batches(strategy, model, own, threads)]
    once, most = steps[0], steps[-1]
    device = home if home == _HOME else max(once.most, key=lambda each: once.most[each])
    held = {key: getattr(once, key)[device] for key in ("weights", "gradients", "slots")}
    # With more rows another device may hold most.
    peaks = [each.most[home] if home == _HOME else max(each.most.values()) for each in steps]
    per_row = (peaks[2] - peaks[1]) / (rows * (times[2] - times[1]))
    without_rows = peaks[1] - per_row * rows * times[1]
    is_flat = without_rows + per_row * rows < (1 - _MISSES) * peaks[0]
    # The graph of mirrored is that of all devices.
    traced_ranks = ranks if name in ("mirrored", "parameter_server") else 1
    flops, crossing = once.flops * ranks / traced_ranks, once.crossing
    more_rows = rows * (times[2] - times[0])
    flops_per_row = (most.flops - once.flops) / more_rows * ranks / traced_ranks
    crossing_per_row = (most.crossing - once.crossing) / more_rows
    # Of divided weights each rank has the gradients of its own, which are sums of all others'.
    parts = ranks if options.get("shard") == "weights" else 1
    needs = Needs(
        strategy=name,
        options=dict(options),
        devices=ranks * of_each,
        **held,
        fixed=without_rows - sum(held.values()),
        per_row=per_row,
        least=peaks[0] if is_flat else 0.0,
        flops=flops - flops_per_row * rows,
        flops_per_row=flops_per_row,
        half=once.half_flops / once.flops if once.flops else 0.0,
        summed=held["gradients"] * parts if ranks > 1 else 0,
        crossing=crossing - crossing_per_row * rows if is_divided else 0.0,
        crossing_per_row=crossing_per_row if is_divided else 0.0,
    )
    if name == "parameter_server":
        moved = needs.weights + needs.gradients
        return dataclasses.replace(needs, slots=0, summed=0, crossing=moved)
    return needs


def _check_has_graph(model: Any) -> None:
    if model.run_eagerly:
        raise ModelError(
            "a step that is planned must be a graph",
            received=f"model '{model.name}' with run_eagerly=True",
            mend="Compile it without run_eagerly",
        )


def _strategy(name: str, options: Mapping[str, Any], devices: int) -> Any:
    """Returns the strategy, of whose several processes one is enough."""
    if name == "mirrored":
        return tfdist.strategy(name, **{"devices": devices, **options})
    if spec_of(name).divides_model:
        if options.get("replicas") and options.get("shard", "none") != "none":
            raise OptionError(
                "slots that ranks of a divided model divide once more must be measured, not "
                "planned",
                received=f"strategy '{name}' with shard={options['shard']!r}",
                mend="Leave shard out of the plan: slots are at most what it tells then",
            )
        # Named devices are those of the machine that trains.
        here = {key: options[key] for key in options if key not in ("replicas", "devices")}
        return tfdist.strategy(name, **here)
    tfdist.strategy(name, **options)  # Refuses what it does not know.
    if not spec_of(name).launchers:
        return tfdist.strategy(name, **options)
    shared = inspect.signature(DataParallel.__init__).parameters
    ranks = 1 if spec_of(name).is_asynchronous else devices
    return UnconnectedRank(ranks, name, **{key: options[key] for key in options if key in shared})


@contextmanager
def _home(strategy: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Encloses a step that moves something to the host: another device than the one it runs on."""
    is_moved = options.get("offload", "none") != "none"
    if not is_moved or not getattr(strategy, "slots_can_be_offloaded", False):
        yield
        return
    make_logical_cpus(2)
    with tf.device(_HOME):
        yield


class _Step:
    """What the graph of a step tells for one batch.

    Attributes:
        weights, slots, gradients: device -> bytes.
        most: device -> the most bytes there at any time of a step, variables included.
        flops, half_flops: operations on all devices, and those of them in 16 bits.
        crossing: bytes that go from one device to another.
    """

    def __init__(self, model: Any, traced: Any, rows: int, threads: int):
        operations = step_graph.of(traced, rows)
        self.weights, self.slots, self.gradients, others = _held(model, traced)
        held = self.weights + self.slots + others
        live = live_bytes.most_on_each(operations, threads)
        self.most = {device: most + held[device] for device, most in live.items()}
        shapes = [each.shapes for each in operations]
        flops = [
            flops_of(each, [shapes[source][slot] for source, slot in each.inputs])
            for each in operations
        ]
        _check_products(operations, flops)
        self.flops = sum(flops)
        self.half_flops = sum(
            count
            for each, count in zip(operations, flops, strict=True)
            if count and each.sizes[0] == 2 * math.prod(each.shapes[0])
        )
        sent = {
            (source, slot, each.device): operations[source].sizes[slot]
            for each in operations
            for source, slot in each.inputs
            if operations[source].device != each.device
        }
        self.crossing = sum(sent.values())


def _check_products(operations: Sequence[step_graph.Operation], flops: Sequence[float]) -> None:
    """Raises ModelError: one has a size that only shows when it runs; it would count as one row."""
    open_ones = [
        each.name for each, count in zip(operations, flops, strict=True) if count and each.is_open
    ]
    if open_ones:
        raise ModelError(
            "a step that is planned must have products of known sizes",
            received=f"operation '{open_ones[0]}', whose size shows when it runs",
            mend="Leave out what chooses rows by their values, as boolean_mask does, or try the "
            "largest batch with `tfdist bench`",
        )


def most_on_each(strategy: Any, model: Any, rows: int) -> dict[str, int]:
    """Returns device -> the most bytes there in a step of ``rows`` rows, variables included."""
    return _of_batches(strategy, model, [rows], pool_threads())[0].most


def pool_threads() -> int:
    """Returns how many threads run operations of CPUs in this process."""
    asked = tf.config.threading.get_inter_op_parallelism_threads()
    return asked or len(os.sched_getaffinity(0))


def _of_batches(strategy: Any, model: Any, batches: Sequence[int], threads: int) -> list[_Step]:
    """Returns what a step on made-up rows tells for each batch; it is traced on the first."""
    rows = batches[0]
    data = strategy.dataset(made_up_rows(model, rows), global_batch_size=rows)
    function, _ = traced(model, lambda: model.fit(data, verbose=0))
    shares = [math.ceil(rows / strategy.num_replicas) for rows in batches]
    return [_Step(model, function, share, threads) for share in shares]


def traced(model: Any, fit: Callable[[], Any]) -> tuple[Any, tuple[Any, ...]]:
    """Returns the concrete function of the first train step of ``fit``, which ends before it.

    And what it would have been called with: an iterator, or a batch.
    """
    found: list[Any] = []
    make = model.make_train_function
    # Engines wrap the step that TensorFlow traces, each in its own way.
    functions = type(tf.function(lambda: None))
    call = functions.__call__

    def trace(function: Any, *args: Any, **options: Any) -> Any:
        functions.__call__ = call  # A step may call other functions, which are traced with it.
        found.append((function.get_concrete_function(*args, **options), args))
        raise _Traced

    def instead(force: bool = False) -> Any:
        step = make(force)

        def first(iterator: Any) -> Any:
            functions.__call__ = trace
            return step(iterator)

        model.train_function = first
        return first

    with (
        replaced(functions, __call__=call),
        replaced(model, train_function=None, make_train_function=instead),
        suppress(_Traced),
    ):
        fit()
    return found[0]


def made_up_rows(model: Any, rows: int) -> tuple[Any, ...]:
    """Returns (x, y), any values of the shapes that a model reads, which take no room."""
    inputs, outputs = getattr(model, "inputs", None), getattr(model, "outputs", None)
    if not inputs or not outputs:
        raise ModelError(
            "a model that is planned must tell its inputs and outputs before data come",
            received=f"model '{model.name}' of a class of its own",
            mend="Make it of layers, as keras.Model(inputs, outputs)",
        )
    open_ones = [each for each in inputs if None in tuple(each.shape)[1:]]
    if open_ones:
        raise ModelError(
            "a model that is planned must have inputs of one size, but for the batch",
            received=f"an input of shape {tuple(open_ones[0].shape)}",
            mend="Give the largest size of your data: keras.Input((128,))",
        )
    x = _in_structure(model.input_names, [_many(each.shape, each.dtype, rows) for each in inputs])
    return x, _in_structure(model.output_names, _labels(model, rows))


def _in_structure(names: list[str], leaves: list[Any]) -> Any:
    return leaves[0] if len(leaves) == 1 else dict(zip(names, leaves, strict=True))


def _labels(model: Any, rows: int) -> list[Any]:
    losses = compiled_losses(model)
    if isinstance(losses, Mapping):
        losses = [losses.get(name) for name in model.output_names]
    elif not isinstance(losses, (list, tuple)):
        losses = [losses] * len(model.outputs)
    found = []
    for output, loss in zip(model.outputs, losses, strict=True):
        is_sparse = "sparse" in name_of(loss).lower()
        shape = output.shape[:-1] if is_sparse else output.shape
        found.append(_many(shape, "int64" if is_sparse else "float32", rows))
    return found


def _many(shape: Any, dtype: Any, rows: int) -> np.ndarray:
    row = made_up(tf.TensorSpec(shape, dtype)).numpy()[0]
    return np.broadcast_to(row, (rows, *row.shape))


def _held(model: Any, traced: Any) -> tuple[collections.Counter[str], ...]:
    """Returns device -> bytes of weights, of slots, of gradients, and of other variables."""
    named = {_name(weight) for weight in model.weights}
    metrics = {_name(each) for metric in model.metrics for each in metric.variables}
    weights, slots, gradients, others = (collections.Counter() for _ in range(4))
    for variable in {id(one): one for one in step_graph.variables_of(traced).values()}.values():
        size = variable.shape.num_elements() * variable.dtype.size
        device = step_graph.short(variable.device)
        is_named = _name(variable) in named
        if not is_named and (variable.shape.rank == 0 or _name(variable) in metrics):
            others[device] += size
        elif is_named or variable.trainable:
            weights[device] += size
            gradients[device] += size if variable.trainable else 0
        else:
            slots[device] += size
    return weights, slots, gradients, others


def _name(variable: Any) -> str:
    """A replica's copy of a variable has another name than that of the first."""
    return variable.name.split(":")[0].split("/replica")[0]
