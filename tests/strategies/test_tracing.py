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
def test_each_batch_normalization_costs_the_same_on_mirrored():
    few, more, many = counts("mirrored", 3, 6, 12)
    for kind in ("walked", "operations"):
        first, second = more[kind] - few[kind], many[kind] - more[kind]
        # Twice as many more layers: twice as much more, and not four times.
        assert 0 < second <= 2.5 * first, (kind, few, more, many)
    # Both replicas, forward and back, a Dense layer and the optimizer included.
    assert (many["operations"] - more["operations"]) / 6 < 420
