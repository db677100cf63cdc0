"""``python -m benchmarks``: tfdist against code written by hand, as one table and as JSON."""

from __future__ import annotations

import datetime
import importlib
import json
import platform
import time
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import machine

_RESULTS = Path(__file__).parent / "results"
# Each module has run(quick: bool) -> list of rows; and table(rows) where they are no ratios.
MODULES = (
    "records",
    "own_data",
    "buckets",
    "scale",
    "horovod_fit",
    "multi_worker",
    "step_options",
    "device_speeds",
    "offload",
    "shard",
    "tables",
    "mesh",
    "pipeline",
    "federated",
    "tflite",
    "serve",
    # Bytes, processor seconds, exit codes: what others' work hardly changes comes last.
    "plan",
    "first_step",
    "survival",
)


@click.command()
@click.option(
    "--quick", is_flag=True, help="Only see that everything runs; the ratios mean little."
)
@click.option(
    "--only", type=click.Choice(MODULES), multiple=True, help="Leave out the others. Repeatable."
)
def main(quick: bool, only: tuple[str, ...]) -> None:
    """Measures tfdist against code written by hand. Takes about an hour on two idle cores."""
    console = Console()
    facts = {
        "cores": psutil.cpu_count(logical=False),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "quick": quick,
        "load_before": machine.load(),
    }
    path = _RESULTS / f"{datetime.datetime.now():%Y-%m-%dT%H-%M-%S}.json"
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    own_tables: list[Table] = []
    took: dict[str, int] = {}
    broken: list[str] = []
    for name in only or MODULES:
        module = importlib.import_module(f"benchmarks.{name}")
        begun = time.monotonic()
        try:
            with console.status(f"measuring: {name}"):
                if not quick:
                    machine.wait_until_quiet()
                found = module.run(quick=quick)
        except Exception:  # What breaks in one part costs none of the others.
            console.print_exception()
            broken.append(name)
            continue
        took[name] = round(time.monotonic() - begun)
        console.print(f"{name}: {took[name]} s")
        rows += found
        if hasattr(module, "table"):
            own_tables.append(module.table(found))
        else:
            ratios += found
        # After each part, for whoever ends it before the last one.
        after = facts | {"load_after": machine.load(), "seconds": took}
        _write(path, {"machine": after, "rows": rows})
    for table in ([_table(ratios)] if ratios else []) + own_tables:
        console.print(table)
    if rows:
        console.print(f"written to {path}", soft_wrap=True)
    if broken:
        raise click.ClickException(f"not measured, see above: {', '.join(broken)}")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title="by hand and with tfdist: records/s, steps/s, requests/s, s, ms or MB",
        title_justify="left",
    )
    table.add_column("work", overflow="fold")
    for name in ("hand-written", "tfdist", "ratio", "target", "met"):
        table.add_column(name, justify="right")
    for row in rows:
        target = row["target"]
        wanted = "" if target is None else f">= {target:g}"
        speeds = (f"{row[name]:,}" for name in ("baseline", "ours"))
        table.add_row(row["work"], *speeds, f"{row['ratio']:g}", wanted, _met(row))
    return table


def _met(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return ""
    if row.get("others", 0.0) > machine.QUIET_SHARE:
        return "busy"  # Others computed all the while: neither yes nor no would be true.
    return "yes" if row["ratio"] >= row["target"] else "no"


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=2) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
