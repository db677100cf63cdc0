"""The decision how a model becomes a pipeline: cuts, chunks and schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.errors import OptionError, unknown_choice
from tfdist.keras.layers import layers_in, variables_in
from tfdist.keras.steps import follow_trainable
from tfdist.strategies.pipeline import schedule
from tfdist.strategies.pipeline.chunks import Chunk, make_chunks
from tfdist.strategies.pipeline.measure import Cost, Measured
from tfdist.strategies.pipeline.options import Options, check_enough, cuts_after
from tfdist.strategies.pipeline.refusals import check_model, random_layers
from tfdist.strategies.pipeline.schedule import Schedule
from tfdist.training.layers.randomness import is_seeded
from tfdist.training.memory.balanced_cuts import balance
from tfdist.training.model.layer_calls import Call, Graph, crossing_bytes, normalizes

# Costs of memory need a number of rows, and a model tells none: Keras' default batch.
_ASSUMED_ROWS = 32
_BACKWARD_AND_FORWARD = 3.0


@dataclass(frozen=True)
class Plan:
    """A model cut into chunks.

    Attributes:
        graph: all calls, the frozen ones first.
        cuts: the first call of each chunk but the first one.
        num_norms: calls whose statistics are those of the whole batch.
        schedule: of the chunks.
        num_frozen: leading calls that are frozen.
        measured: what the calls cost; None when that is estimated.
    """

    graph: Graph
    cuts: tuple[int, ...]
    num_norms: int
    schedule: Schedule
    options: Options
    num_frozen: int
    measured: Measured | None

    @property
    def calls(self) -> tuple[Call, ...]:
        return self.graph.calls

    @property
    def normalizing(self) -> list[int]:
        """The calls whose statistics are those of the whole batch, as layers are trained now."""
        return _normalizing(self.calls, self.options)

    def frozen_chunk(self, results: Sequence[Any], devices: Sequence[str]) -> Chunk:
        """Returns the frozen layers as one chunk that gives ``results``."""
        frozen = self.calls[: self.num_frozen]
        return make_chunks(frozen, results, (), devices[:1])[0]

    def chunks(self, devices: Sequence[str], leading: int = 0) -> tuple[Chunk, ...]:
        """Returns the chunks, or what remains of them without so many ``leading`` calls."""
        return make_chunks(
            self.calls[leading:],
            self.graph.outputs,
            [cut - leading for cut in self.cuts],
            [devices[stage] for stage in self.schedule.device_of],
        )

    def calls_of_chunk(self, chunk: int) -> tuple[Call, ...]:
        bounds = [0, *self.cuts, len(self.calls)]
        return self.calls[bounds[chunk] : bounds[chunk + 1]]

    def stage_of_variables(self) -> dict:
        """Returns ``variable.ref()`` -> stage; a shared layer's are on the first that calls it."""
        stages: dict = {}
        for chunk, stage in enumerate(self.schedule.device_of):
            for call in self.calls_of_chunk(chunk):
                for variable in variables_in(call.layer):
                    stages.setdefault(variable.ref(), stage)
        return stages

    def costs(self) -> list[float]:
        """Returns what a microbatch costs in each chunk forward: operations a row, or seconds.

        Where it is measured, a third of forward and backward together, as a schedule assumes it.
        """
        if self.measured is None:
            costs = [call.flops for call in self.calls]
        else:
            costs = [(c.forward_s + c.backward_s) / 3 for c in self.measured.costs]
        if self.options.frozen_cache is not None:
            costs[: self.num_frozen] = [0.0] * self.num_frozen
        bounds = [0, *self.cuts, len(costs)]
        return [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Named:
    """Where the layers stand that a user has named.

    Keras gives other names to the unnamed layers of each model it makes, so names are looked up
    once, in the first of two equal models.

    Attributes:
        frozen: calls whose layers are not trained; the others are numbered after them.
        cuts: as asked for with ``cut_after``; None when they are to be chosen.
    """

    frozen: tuple[int, ...]
    cuts: tuple[int, ...] | None


def find_named(graph: Graph, options: Options) -> Named:
    """Raises:
    OptionError: the model has no such layers, or not in this order.
    """
    frozen = () if options.freeze_until is None else _leading_to(graph, options.freeze_until)
    graph = graph.with_first(frozen)
    cuts = None
    if options.cut_names is not None:
        cuts = cuts_after(
            [_resolved(graph, name, "cut_after") for name in options.cut_names], len(graph.calls)
        )
    if options.frozen_cache is not None:
        _check_live(graph, options, len(frozen), cuts)
    return Named(frozen, cuts)


def _check_live(
    graph: Graph, options: Options, num_frozen: int, cuts: tuple[int, ...] | None
) -> None:
    """Raises:
    OptionError: a part of the model has frozen layers alone, and nothing to do when their
        outputs are kept.
    """
    num_live = len(graph.calls) - num_frozen
    if num_live < options.parts or (cuts and cuts[0] <= num_frozen):
        raise OptionError(
            "each part of a model with frozen_cache must have a layer that is not frozen",
            received=f"{num_live} such layers after '{options.freeze_until}' for "
            f"{options.parts} parts"
            + (f", the first cut after '{graph.names[cuts[0] - 1]}'" if cuts else ""),
            mend="Choose fewer stages, a later cut_after or an earlier freeze_until",
        )


def _resolved(graph: Graph, name: str, option: str) -> tuple[str, list[int]]:
    """Returns ``name`` and the calls that it means."""
    found = [number for number, call in enumerate(graph.calls) if call.is_called(name)]
    if not found:
        raise unknown_choice(f"layer in {option}", name, list(dict.fromkeys(graph.names)))
    return name, found


def _leading_to(graph: Graph, last: str) -> tuple[int, ...]:
    """Returns the calls of the layer called ``last``, and all that its inputs come from."""
    _, named = _resolved(graph, last, "freeze_until")
    wanted: set[int] = set()
    found = []
    for number, call in reversed(list(enumerate(graph.calls))):
        if number in named or any(id(tensor) in wanted for tensor in call.outputs):
            found.append(number)
            wanted.update(id(tensor) for tensor in call.inputs)
    return tuple(reversed(found))


def freeze(model: tf.keras.Model, graph: Graph, named: Named) -> Graph:
    """Makes the named leading layers untrainable; returns the graph with them first."""
    for number in named.frozen:
        for part in layers_in(graph.calls[number].layer):  # None in an operation of Keras 3.
            part.trainable = False
    if named.frozen:
        # Keras' fit goes by what was trainable when the model was compiled; to compile it anew
        # would need the user's arguments.
        follow_trainable(model)
    return graph.with_first(named.frozen)


def make_plan(
    model: tf.keras.Model,
    graph: Graph,
    options: Options,
    named: Named,
    measured: Measured | None = None,
) -> Plan:
    """Raises:
    ModelError: this model cannot become a pipeline.
    OptionError: the options do not fit the model.
    """
    calls = graph.calls
    check_model(model, calls, options.batch_norm)
    if options.recomputes:
        _refuse_other_numbers(calls)
    whole = [
        f"submodel '{call.name}' ({type(call.layer).__name__})"
        for call in calls
        if isinstance(call.layer, tf.keras.Model)
    ]
    check_enough(len(calls), options.parts, options.stages, model.name, whole)
    cuts = named.cuts
    if cuts is None:
        cuts = _balanced(calls, options, len(named.frozen), measured)
    norms = _normalizing(calls, options)
    made = schedule.make(
        options.schedule,
        stages=options.stages,
        microbatches=options.microbatches,
        chunks_per_stage=options.chunks_per_stage,
    )
    if norms:
        if options.schedule != "gpipe":
            layer = calls[norms[0]].layer.name
            raise OptionError(
                "a model with synchronized BatchNormalization must have schedule='gpipe', where "
                "all microbatches have gone forward before one goes backward",
                received=f"schedule={options.schedule!r} with layer '{layer}'",
                mend="Choose schedule='gpipe', or batch_norm='per_microbatch' (not exact)",
            )
        made, cuts = with_whole_batches(
            [0, *cuts, len(calls)],
            norms,
            microbatches=options.microbatches,
            short_after=len(named.frozen) if options.recomputes else None,
        )
    return Plan(graph, cuts, len(norms), made, options, len(named.frozen), measured)


def _normalizing(calls: Sequence[Call], options: Options) -> list[int]:
    is_synchronized = options.batch_norm == "synchronized"
    return [n for n, call in enumerate(calls) if is_synchronized and normalizes(call)]


def _balanced(
    calls: Sequence[Call], options: Options, num_frozen: int, measured: Measured | None
) -> tuple[int, ...]:
    if measured is None:
        costs = [_cost(call, options) for call in calls]
    else:
        found = zip(calls, measured.costs, strict=True)
        costs = [_measured_cost(call, cost, options) for call, cost in found]
    crossing = [crossing_bytes(calls, cut) for cut in range(len(calls))]
    if options.frozen_cache is None:
        return balance(costs, crossing, options.parts)
    # The frozen layers stay with the first of the others, and take no time.
    live = costs[num_frozen:]
    if options.optimize == "memory":
        live[0] += sum(call.weight_bytes for call in calls[:num_frozen])
    cuts = balance(live, crossing[num_frozen:], options.parts)
    return tuple(cut + num_frozen for cut in cuts)


def _cost(call: Call, options: Options) -> float:
    if options.optimize == "memory":
        return float(call.memory_bytes(_ASSUMED_ROWS))
    frozen = bool(variables_in(call.layer)) and not call.layer.trainable
    return call.flops * (1.0 if frozen else _BACKWARD_AND_FORWARD)


def _measured_cost(call: Call, cost: Cost, options: Options) -> float:
    if options.optimize == "memory":
        # A stage keeps what all microbatches leave, or in other schedules its share of that.
        return call.state_bytes + cost.kept_bytes * float(options.microbatches)
    return cost.forward_s + cost.backward_s


def _refuse_other_numbers(calls: Sequence[Call]) -> None:
    random = random_layers(calls, but=is_seeded)
    if random:
        raise OptionError(
            "layers that recompute runs twice must draw the same random numbers each time",
            received=f"layers that draw them, {', '.join(random)}",
            mend="Augment in the map_fn of strategy.dataset, or leave recompute out",
        )


def with_whole_batches(
    bounds: Sequence[int], norms: Sequence[int], *, microbatches: int, short_after: int | None
) -> tuple[Schedule, tuple[int, ...]]:
    """Returns a schedule, and the first call of each of its chunks but the first one.

    Layers of a stage take batches whole for the sake of BatchNormalization. Its statistics are
    those of the whole batch, so microbatches would wait for each other at each such layer: between
    two of them, on one device, nothing is gained by dividing a batch. Stages overlap where one goes
    over into the next, from the last of the one to the first of the other.

    Args:
        bounds: the first call of each stage, and the number of calls.
        norms: calls with statistics of the whole batch.
        short_after: after this call a chunk begins at each of ``norms``, since a chunk is what
            recompute keeps at one time; None: chunks are as long as they can be.
    """
    starts: list[int] = []
    stages: list[int] = []
    whole: set[int] = set()
    last = len(bounds) - 2
    for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
        own = [number for number in norms if begin <= number < end]
        own_starts = {begin}
        if own:
            first = begin if stage == 0 else own[0]
            stop = end if stage == last else own[-1] + 1
            own_starts |= {first, stop} - {end}
            if short_after is not None:
                own_starts |= {number for number in own if number > max(first, short_after)}
            places = enumerate(sorted(own_starts), len(starts))
            whole |= {place for place, start in places if first <= start < stop}
        starts += sorted(own_starts)
        stages += [stage] * len(own_starts)
    made = schedule.gpipe(tuple(stages), microbatches, frozenset(whole))
    return made, tuple(starts[1:])
