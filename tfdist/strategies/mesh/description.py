"""What a model on a mesh costs: the bytes of each weight on a device, the collectives of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tensorflow as tf

from tfdist import keras
from tfdist.strategies.mesh.layout import path_of
from tfdist.strategies.mesh.steps import Program
from tfdist.strategies.model_parallel import Place

if TYPE_CHECKING:
    from rich.table import Table

    from tfdist.strategies.mesh.model import MeshModel


@dataclass(frozen=True)
class WeightRow:
    """A weight; ``bytes_per_device`` with its optimizer slots, read from the slices themselves."""

    path: str
    shape: tuple[int, ...]
    split: tuple[str | None, ...]
    bytes_per_device: int


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind; ``num_bytes`` is what each device gives to them in a step."""

    kind: str
    axis: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Description:
    """A model on a mesh.

    Attributes:
        mesh: devices on the axes batch and model.
        num_rows: records of the step whose collectives are listed.
        measured_bytes: device -> what the variables that it works with hold now; one that logical
            CPUs share counts for each of them.
        places: of all ranks; each holds such a mesh.
    """

    mesh: tuple[int, int]
    weights: tuple[WeightRow, ...]
    collectives: tuple[CollectiveRow, ...]
    num_rows: int
    measured_bytes: dict[str, int]
    places: tuple[Place, ...] = ()

    @property
    def bytes_per_device(self) -> int:
        return sum(row.bytes_per_device for row in self.weights)

    def print(self) -> None:
        from rich.console import Console
        from rich.table import Table

        batch, model = self.mesh
        title = f"mesh batch={batch} x model={model}: weights and optimizer on each device"
        weights = Table("weight", "shape", "split", title=title)
        weights.add_column("bytes per device", justify="right")
        for row in self.weights:
            split = " x ".join(axis or "whole" for axis in row.split) if any(row.split) else "whole"
            shape = " x ".join(map(str, row.shape))
            weights.add_row(row.path, shape, split, f"{row.bytes_per_device:,}")
        weights.add_section()
        weights.add_row("all", "", "", f"{self.bytes_per_device:,}")
        title = f"collectives of a training step on {self.num_rows} records"
        collectives = Table("collective", "mesh axis", title=title)
        for name in ("number", "bytes of each device"):
            collectives.add_column(name, justify="right")
        for row in self.collectives:
            collectives.add_row(row.kind, row.axis, str(row.count), f"{row.num_bytes:,}")
        console = Console(markup=False, highlight=False, emoji=False)
        if not console.is_terminal:
            console.width = 120
        console.print(weights)
        console.print(collectives)
        if len(self.places) > 1:
            console.print(self._grid())

    def _grid(self) -> Table:
        from rich.table import Table

        batch, model = self.mesh
        grid = Table("host", "rank", "device", "batch", "model", "bytes", title="all ranks")
        grid.columns[-1].justify = "right"
        parts = batch * len(self.places)
        for place in self.places:
            for number, device in enumerate(place.devices):
                row, column = place.rank * batch + number // model, number % model
                grid.add_row(
                    place.host,
                    str(place.rank),
                    device,
                    f"{row + 1} of {parts}",
                    f"{column + 1} of {model}",
                    f"{self.bytes_per_device:,}",
                )
        return grid


def describe(on_mesh: MeshModel, num_rows: int, places: tuple[Place, ...]) -> Description:
    """Returns the layout of a model, and what a training step on ``num_rows`` records sends.

    Args:
        places: see ``Description``.
    """
    state = on_mesh.state
    rows = []
    for variable in on_mesh.model.weights:
        parts = [sliced.slices[0] for sliced in state.held_for(variable)]
        rows.append(
            WeightRow(
                path=path_of(variable),
                shape=tuple(variable.shape),
                split=on_mesh.layout.settled[id(variable)],
                bytes_per_device=sum(p.shape.num_elements() * p.dtype.size for p in parts),
            )
        )
    return Description(
        mesh=(on_mesh.devices.axis_size("batch"), on_mesh.devices.axis_size("model")),
        weights=tuple(rows),
        collectives=_collectives(on_mesh, num_rows),
        num_rows=num_rows,
        measured_bytes={
            device.rpartition("device:")[2]: held
            for device, held in state.bytes_per_device().items()
        },
        places=places,
    )


def _collectives(on_mesh: MeshModel, num_rows: int) -> tuple[CollectiveRow, ...]:
    model, devices = on_mesh.model, on_mesh.devices

    def step() -> None:
        x = tf.nest.map_structure(
            lambda symbol: tf.zeros([num_rows, *symbol.shape[1:]], symbol.dtype),
            keras.graph.nested_inputs(model),
        )
        program = Program(
            on_mesh.state,
            on_mesh.layout,
            x,
            training=True,
            seed=tf.zeros([2], tf.int64),
            segments=on_mesh.segments,
        )
        program.run(
            lambda y, _: tf.add_n([tf.reduce_sum(part) for part in tf.nest.flatten(y)]),
            keras.graph.nested_outputs(model),  # Something for all outputs that have a loss.
        )
        for gradient in program.gradients.values():
            program.slices_of(gradient)  # The sum over the mesh is made when it is asked for.

    devices.collectives.clear()
    tf.function(step, autograph=False).get_concrete_function()
    counts: Counter = Counter()
    sizes: Counter = Counter()
    for kind, axis, num_bytes in devices.collectives:
        counts[kind, axis] += 1
        sizes[kind, axis] += num_bytes
    return tuple(CollectiveRow(*key, counts[key], sizes[key]) for key in counts)
