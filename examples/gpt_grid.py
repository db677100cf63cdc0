"""The GPT of gpt.py on a grid of devices, none of which could hold it with its optimizer.

Two ranks, each with two stages of the model, and Adam's slots of each stage divided among the
ranks. It proves that the weights are those of one device, trains, and shows what each device holds:

tfdist launch --strategy horovod --workers 2 -- python -m tfdist.examples.gpt_grid
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tensorflow import keras

from tfdist.examples.gpt import data, model_fn

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy

#: Of the bytes that one device would hold: what each device may.
LIMIT = 0.5
_SLOTS = 2  # Of Adam, for each weight.
#: Rows of a global batch.
BATCH = 32


def strategy() -> Strategy:
    """Returns what divides the model: two stages on each rank, the slots among the ranks."""
    import tfdist

    return tfdist.strategy(
        "pipeline", stages=2, optimize="memory", replicas="horovod", shard="optimizer"
    )


def main() -> None:
    import tfdist
    from tfdist.errors import TfdistError

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="steps to train for; an epoch without")
    options = parser.parse_args()
    try:
        with strategy() as grid:
            report = tfdist.verify(model_fn, data(), grid, global_batch_size=BATCH, steps=10)
            if report is not None:  # Of several processes the first one has it.
                print(report, flush=True)
            model = grid.build(model_fn)
            train = grid.dataset(data(), global_batch_size=BATCH)
            if options.steps is not None:
                train = train.limited(options.steps)
            model.fit(train, verbose=2 if grid.topology.is_chief else 0)
            if grid.topology.is_chief:
                show(model, grid.describe(model).grid)
    except TfdistError as error:
        parser.error(str(error))


def show(model: keras.Model, grid: tuple) -> None:
    """Prints what each device holds, beside what one device would."""
    weights = sum(4 * weight.shape.num_elements() for weight in model.trainable_weights)
    whole = (1 + _SLOTS) * weights
    print(f"one device would hold {whole / 1e3:.0f} kB; the limit is {LIMIT * whole / 1e3:.0f} kB")
    for row in grid:
        held = row.weight_bytes + row.optimizer_bytes
        print(
            f"rank {row.rank}, stage {row.stage} on {row.device}: {held / 1e3:.0f} kB, of which "
            f"{row.weight_bytes / 1e3:.0f} are weights"
        )
        if held > LIMIT * whole:
            raise SystemExit(f"gpt_grid: rank {row.rank} holds more on {row.device} than it may")


if __name__ == "__main__":
    main()
