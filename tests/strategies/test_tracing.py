"""A first step takes as much for each layer of a deep model as for each of a shallow one.

No time is measured: TensorFlow's own counts of what it makes and looks at do not depend on it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "tracing_scenarios.py"


def counts(strategy: str, *numbers_of_layers: int, **options: object) -> list[dict[str, int]]:
    done = subprocess.run(
        [sys.executable, PROGRAM, strategy, json.dumps(options), *map(str, numbers_of_layers)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
@pytest.mark.long
def test_each_batch_normalization_costs_the_same_on_mirrored():
    few, more, many = counts("mirrored", 3, 6, 12)
    for kind in ("walked", "operations"):
        first, second = more[kind] - few[kind], many[kind] - more[kind]
        # Twice as many more layers: twice as much more, and not four times.
        assert 0 < second <= 2.5 * first, (kind, few, more, many)
    # Both replicas, forward and back, a Dense layer and the optimizer included.
    assert (many["operations"] - more["operations"]) / 6 < 420


def per_layer(strategy: str, **options: object) -> float:
    few, more = counts(strategy, 1, 3, **options)
    return (more["operations"] - few["operations"]) / 2


@pytest.mark.timeout(600)
def test_a_pipeline_makes_the_operations_of_its_layers_once_for_all_microbatches():
    four, eight = (per_layer("pipeline", stages=2, microbatches=number) for number in (4, 8))
    # What hands a microbatch on, and adds its gradients up; a Dense and a BatchNormalization.
    assert 0 < (eight - four) / 4 < 45, (four, eight)
