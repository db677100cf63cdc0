"""What a pipeline looks like: its stages in a table, its schedule as a chart."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.keras.layers import variables_in
from tfdist.records.report_text import as_text
from tfdist.strategies.model_parallel import Place
from tfdist.strategies.pipeline import gantt, schedule
from tfdist.strategies.pipeline.measure import Cost
from tfdist.strategies.pipeline.plan import Plan
from tfdist.training.engine.binding import Binding
from tfdist.training.model.layer_calls import crossing_bytes


@dataclass(frozen=True)
class StageRow:
    """A stage.

    Attributes:
        device: where it runs.
        first, last: its first and last layer.
        num_layers: calls of layers.
        weight_bytes: bytes of its weights, without gradients and optimizer slots.
        cost: its part of the estimated operations, or of the measured time, in [0, 1].
        bytes_sent_per_row: of activations, to later stages.
        most_in_flight: the most microbatches (in interleaved chunks) whose activations it keeps.
        measured: what its layers take for a microbatch, all together; None when not measured.
    """

    device: str
    first: str
    last: str
    num_layers: int
    weight_bytes: int
    cost: float
    bytes_sent_per_row: int
    most_in_flight: int
    measured: Cost | None


@dataclass(frozen=True)
class GridRow:
    """A stage of a rank.

    Attributes:
        host: where the rank is.
        rank: its number, and so that of the share of a global batch.
        device: of the rank.
        stage: of the model.
        weight_bytes: as of ``StageRow``.
        optimizer_bytes: of the optimizer's slots, and with shard="optimizer" of the parts of the
            weights that the rank updates; None before the first fit has made them.
    """

    host: str
    rank: int
    device: str
    stage: int
    weight_bytes: int
    optimizer_bytes: int | None


@dataclass(frozen=True)
class Description:
    """The stages and the schedule of a built model, and where all ranks have it.

    Printing it shows all three.

    Attributes:
        optimizer_bytes: of a rank, by device; see ``GridRow``.
    """

    plan: Plan
    devices: tuple[str, ...]
    places: tuple[Place, ...] = ()
    optimizer_bytes: Mapping[str, int] | None = None

    @property
    def grid(self) -> tuple[GridRow, ...]:
        """All stages of all ranks; empty before the strategy is started."""
        stages, kept = self.stages, self.optimizer_bytes
        return tuple(
            GridRow(
                host=place.host,
                rank=place.rank,
                device=device,
                stage=number,
                weight_bytes=stages[number].weight_bytes,
                optimizer_bytes=None if kept is None else kept.get(device, 0),
            )
            for place in self.places
            for number, device in enumerate(place.devices)
        )

    @property
    def stages(self) -> tuple[StageRow, ...]:
        plan, made = self.plan, self.plan.schedule
        costs = plan.costs()
        bounds = [0, *plan.cuts, len(plan.calls)]
        rows = []
        for stage, device in enumerate(self.devices):
            own = [chunk for chunk, of in enumerate(made.device_of) if of == stage]
            calls = [call for chunk in own for call in plan.calls_of_chunk(chunk)]
            leaving = [
                bounds[chunk + 1]
                for chunk in own
                if chunk + 1 < made.num_chunks and made.device_of[chunk + 1] != stage
            ]
            chunks_flown = len(own) if made.name == "gpipe" else 1
            weights = {w.ref(): w for call in calls for w in variables_in(call.layer)}
            rows.append(
                StageRow(
                    device=device,
                    first=calls[0].name,
                    last=calls[-1].name,
                    num_layers=len(calls),
                    weight_bytes=sum(
                        (w.shape.num_elements() or 0) * w.dtype.size for w in weights.values()
                    ),
                    cost=sum(costs[chunk] for chunk in own) / max(sum(costs), 1e-30),
                    bytes_sent_per_row=sum(crossing_bytes(plan.calls, cut) for cut in leaving),
                    most_in_flight=made.most_in_flight(stage) // chunks_flown,
                    measured=self._measured(own),
                )
            )
        return tuple(rows)

    @property
    def slowest_layers(self) -> dict[str, Cost]:
        """What was measured of each layer call, by name, the slowest first; empty without that."""
        if self.plan.measured is None:
            return {}
        of_calls = zip(self.plan.calls, self.plan.measured.costs, strict=True)
        by_time = sorted(of_calls, key=lambda pair: -(pair[1].forward_s + pair[1].backward_s))
        names = [call.name for call, _ in by_time]
        return {
            name if names.count(name) == 1 else f"{name} ({number})": cost
            for number, (name, (_, cost)) in enumerate(zip(names, by_time, strict=True))
        }

    def _measured(self, chunks: list[int]) -> Cost | None:
        if self.plan.measured is None:
            return None
        bounds = [0, *self.plan.cuts, len(self.plan.calls)]
        costs = [
            cost
            for chunk in chunks
            for cost in self.plan.measured.costs[bounds[chunk] : bounds[chunk + 1]]
        ]
        return Cost(
            forward_s=sum(cost.forward_s for cost in costs),
            backward_s=sum(cost.backward_s for cost in costs),
            kept_bytes=sum(cost.kept_bytes for cost in costs),
        )

    @property
    def bubble_fraction(self) -> float:
        """The part of the devices' time that they wait, were all chunks equally long."""
        return self.plan.schedule.bubble_fraction()

    @property
    def theoretical_bubble(self) -> float:
        """The same by the papers' formula: without BatchNormalization over the whole batch."""
        options = self.plan.options
        return schedule.theoretical_bubble(
            options.schedule,
            stages=options.stages,
            microbatches=options.microbatches,
            chunks_per_stage=options.chunks_per_stage,
        )

    @property
    def estimated_bubble(self) -> float:
        """The same with the chunks as long as they are estimated, or measured, to be."""
        return self.plan.schedule.bubble_fraction(self._costs())

    def gantt(self) -> str:
        """Returns the schedule as text: one line for each stage, time from left to right."""
        return gantt.text(self.plan.schedule, self._chart_costs())

    def draw(self, path: str | os.PathLike) -> None:
        """Writes the schedule as a PNG."""
        gantt.draw(self.plan.schedule, path, self._title(), self._chart_costs())

    def __str__(self) -> str:
        titles = (
            "stage", "device", "layers", "from", "to", "weights",
            "operations" if self.plan.measured is None else "time", "sent per row",
            "activations kept",
        )  # fmt: skip
        rows = [
            (
                str(number),
                row.device,
                str(row.num_layers),
                row.first,
                row.last,
                _bytes(row.weight_bytes),
                f"{row.cost:.0%}",
                _bytes(row.bytes_sent_per_row),
                str(row.most_in_flight),
            )
            for number, row in enumerate(self.stages)
        ]
        table = _table(titles, rows, right=(0, 2, 5, 6, 7, 8))
        parts = [table, self._title(), self.gantt()]
        if len(self.places) > 1:
            parts.insert(1, self._grid_table())
        if self.plan.num_frozen:
            kept = self.plan.options.frozen_cache
            parts.append(
                f"{self.plan.num_frozen} layers up to '{self.plan.options.freeze_until}' are frozen"
                + (f"; their outputs are kept: {kept}" if kept else "")
            )
        if self.plan.measured is not None:
            parts.append(self._measurement())
        if self.plan.num_norms:
            parts.append(
                f"Whole batches (w) go through the layers between {self.plan.num_norms} "
                "BatchNormalization layers, whose statistics are those of the whole batch."
            )
        return "\n".join(parts)

    def _grid_table(self) -> str:
        ranks, stages = len(self.places), len(self.devices)
        rows = [
            (
                row.host,
                str(row.rank),
                row.device,
                f"rows {row.rank + 1} of {ranks}",
                f"stage {row.stage} of {stages}",
                _bytes(row.weight_bytes),
                "" if row.optimizer_bytes is None else _bytes(row.optimizer_bytes),
            )
            for row in self.grid
        ]
        titles = (
            "host", "rank", "device", "share of a batch", "share of the model", "weights",
            "optimizer",
        )  # fmt: skip
        return _table(titles, rows, right=(1, 5, 6))

    def _measurement(self) -> str:
        lines = [f"Measured on microbatches of {self.plan.measured.rows} rows (forward, backward):"]
        for number, row in enumerate(self.stages):
            cost = row.measured
            lines.append(
                f"stage {number}: {_ms(cost)}, {_bytes(cost.kept_bytes)} kept for the way back"
            )
        slowest = list(self.slowest_layers.items())[:3]
        lines.append("slowest: " + "; ".join(f"{name} {_ms(cost)}" for name, cost in slowest))
        return "\n".join(lines)

    def _title(self) -> str:
        options = self.plan.options
        equal = (
            f"{self.bubble_fraction:.1%} with equal stages (theory {self.theoretical_bubble:.1%})"
        )
        if self.plan.num_norms:  # Theory does not know of whole batches.
            equal = f"{self.theoretical_bubble:.1%} without BatchNormalization"
        return (
            f"{options.schedule}, {options.stages} stages, {options.microbatches} microbatches: "
            f"bubble {equal}, {self.estimated_bubble:.1%} as "
            f"{'estimated' if self.plan.measured is None else 'measured'}"
        )

    def _costs(self) -> list[float]:
        costs = self.plan.costs()
        least = max(costs) * 1e-6  # A chunk without operations still has its turn.
        return [max(cost, least) for cost in costs]

    def _chart_costs(self) -> list[float] | None:
        """Where BatchNormalizations divide a stage, its chunks have nothing like equal lengths."""
        return self._costs() if self.plan.num_norms else None


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> str:
    """Returns a table as text; the columns ``right`` hold numbers."""
    from rich.table import Table

    table = Table(*titles)
    for column in right:
        table.columns[column].justify = "right"
    for row in rows:
        table.add_row(*row)
    return as_text(table)


def _ms(cost: Cost) -> str:
    return f"{cost.forward_s * 1e3:.2f} + {cost.backward_s * 1e3:.2f} ms"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def optimizer_bytes(binding: Binding) -> dict[str, int] | None:
    """Returns the bytes of the optimizer's variables of this process, by device ("CPU:0").

    Slots, and with ``shard="optimizer"`` the parts of weights that the process updates. None before
    the first fit has made them.
    """
    held = _variables(binding)
    if not held:
        return None
    found: dict[str, int] = {}
    for variable in held:
        spec = tf.DeviceSpec.from_string(variable.device)
        device = f"{spec.device_type}:{spec.device_index}"
        size = variable.shape.num_elements() * variable.dtype.size
        found[device] = found.get(device, 0) + size
    return found


def _variables(binding: Binding) -> list[Any]:
    if binding.sharded is None:
        own = keras.optimizers.variables_of(binding.model.optimizer)
        return [variable for variable in own if variable.shape.rank]  # No counters.
    parts = binding.sharded.parts
    groups = () if parts is None else (*parts.variables, *parts.slots.values())
    return [variable for group in groups for variable in group]
