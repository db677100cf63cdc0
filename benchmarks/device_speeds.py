"""A rank that is held to a third of its core: epochs with and without ``device_speeds``.

Each of two ranks has a core of its own. Two busy loops share that of rank 1, which has a third.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from tfdist import train
from tfdist.benching import workloads
from tfdist.cli import saved_weights
from tfdist.launch import hosts

_TOLERANCE = 1e-5
# It ends with the benchmark, however that ends.
_BUSY = """import os, sys
parent = os.getppid()
os.sched_setaffinity(0, map(int, sys.argv[1:]))
while os.getppid() == parent: pass
"""
_LOOPS = 2
#: What a row shows -> whether rank 1 is held, and the options of the strategy.
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "off, no rank held": (False, {}),
    "off": (True, {}),
    "measure": (True, {"device_speeds": "measure"}),
    "[3, 1]": (True, {"device_speeds": [3, 1]}),
}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Returns rows of work, baseline, ours, ratio and target: seconds of an epoch, off and so;
    and how far weights are from one device's."""
    epochs, records = (2, 600) if quick else (6, 6_000)
    with tempfile.TemporaryDirectory(prefix="tfdist-speeds-") as folder:
        root = Path(folder)
        asked = {
            "model": workloads.write_model("mlp", 32, root),
            "data": workloads.write_data("cifar10-like", records, root),
            "epochs": epochs,
            # All in one step: one device and ranks otherwise draw other rows into a batch.
            "global_batch_size": records,
            "verbose": False,
        }
        train(output=root / "one", strategy="single", **asked)
        rows = []
        for strategy in ("horovod", "multi_worker"):
            took = {}
            for number, (name, (is_held, options)) in enumerate(CASES.items()):
                out = root / strategy / str(number)
                with _rank_1_held() if is_held else contextlib.nullcontext():
                    found = train(
                        output=out, strategy=strategy, workers=2, options=options, **asked
                    )
                # The first epoch traces the step.
                took[name] = statistics.median(epoch["seconds"] for epoch in found.history[1:])
                rows.append(_row(strategy, name, took, root / "one", out))
    return rows


def _row(strategy: str, name: str, took: dict[str, float], one: Path, out: Path) -> dict[str, Any]:
    baseline = took.get("off", took[name])
    models = (folder / "model.keras" for folder in (one, out))
    difference = saved_weights.largest_difference(*models)
    return {
        "work": f"{strategy}, {name}",
        "baseline": round(baseline, 3),
        "ours": round(took[name], 3),
        "ratio": round(baseline / took[name], 2),
        "target": 1.0 if "speeds" in CASES[name][1] else None,
        "difference": difference,
        "weights_equal": difference <= _TOLERANCE,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Returns what the command prints of the rows."""
    shown = Table(title="rank 1 has a third of its core, device_speeds", title_justify="left")
    for column in ("work", "s an epoch", "times as fast as off", "weights equal one device's"):
        shown.add_column(column, justify="left" if column == "work" else "right")
    for row in rows:
        equal = "yes" if row["weights_equal"] else f"NO, by {row['difference']:.2g}"
        shown.add_row(row["work"], f"{row['ours']:.2f}", f"{row['ratio']:g}", equal)
    return shown


@contextlib.contextmanager
def _rank_1_held() -> Iterator[None]:
    """Encloses what is trained while busy loops have two thirds of the core of rank 1."""
    command = [sys.executable, "-c", _BUSY, *map(str, hosts.shares(2)[1])]
    loops = [subprocess.Popen(command) for _ in range(_LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
