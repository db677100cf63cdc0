"""``tfdist trace``: where the time of a step goes, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfdist.cli import voice
from tfdist.cli.console import stdout
from tfdist.cli.option_table import plot_option
from tfdist.records.report_text import table_of

if TYPE_CHECKING:
    from tfdist.traces.report import Report

_EPILOG = """\b
Examples:
  tfdist train ... --output runs/digits --profile steps=10:20
  tfdist trace runs/digits
  tfdist trace runs/digits --compare runs/faster
  tfdist trace runs/digits --plot steps.png --perfetto steps.json.gz
"""
_COLUMNS = {
    "compute": "compute",
    "exposed": "exposed comm.",
    "for_data": "waits: data",
    "for_rank": "other rank",
    "for_host": "host",
}


@click.command("trace", epilog=_EPILOG)
@click.argument("run", metavar="RUN")
@click.option("--compare", metavar="RUN2", help="Show what is other in the steps of RUN2.")
@plot_option("Draw two steps of all ranks.")
@click.option(
    "--perfetto", metavar="FILE.json.gz", help="Write all ranks' traces as one, for Perfetto."
)
def command(run: str, compare: str | None, plot: Path | None, perfetto: str | None) -> None:
    """Shows where the time of a step goes, on every rank.

    RUN is the output of a training with --profile steps=A:B, or the folder that --profile named.
    Each moment of a step counts once: as compute where any operation computes; else as
    communication that is exposed; else as waiting, and for what.
    """
    from tfdist.traces import gantt
    from tfdist.traces import perfetto as perfetto_file
    from tfdist.traces.report import report

    if perfetto:
        perfetto_file.check(perfetto)
    found = report(run)
    other = report(compare) if compare else None
    voice.result(trace=found.to_json(), **({"compared": other.to_json()} if other else {}))
    _print(found)
    if other:
        _print(other)
        _print_change(found, other)
    if plot is not None:
        gantt.draw(found, plot)
        stdout().print(f"plot     {plot}")
    if perfetto:
        lacking = perfetto_file.write(found, Path(perfetto))
        for line in (f"perfetto {perfetto}: open it at ui.perfetto.dev", *lacking):
            stdout().print(line)


def _print(found: Report) -> None:
    first = found.traces[0]
    steps = f"{first.steps[0][0]} to {first.steps[-1][1]}"
    title = f"{found.folder}: {first.notes['strategy']}, steps {steps}, ms of a step"
    numbers = ("step", *_COLUMNS.values(), "comm. in all", "overlap", "input in all")
    table = table_of(title, ("rank",), numbers)
    for trace, share in zip(found.traces, found.shares, strict=True):
        parts = [
            f"{getattr(share, name):.1f} {getattr(share, name) / share.step:4.0%}"
            for name in _COLUMNS
        ]
        overlap = "" if share.overlap is None else f"{share.overlap:.0%}"
        table.add_row(
            str(trace.rank),
            f"{share.step:.1f}",
            *parts,
            f"{share.communication:.1f}",
            overlap,
            f"{share.input:.1f}",
        )
    stdout().print(table)
    for line in (*_of_ranks(found), *found.unknown):
        stdout().print(line)
    operations = table_of(None, ("longest operations", "ms of a step", "layer", ""), ())
    operations.columns[1].justify = "right"
    for each in found.longest:
        direction = "backward" if each.backward else ""
        operations.add_row(each.name, f"{each.ms:.2f}", each.layer or "", direction)
    stdout().print(operations)


def _of_ranks(found: Report) -> list[str]:
    late, clocks = found.straggler, found.meetings.uncertainty_ns
    if late is None or clocks is None:
        return []
    aligned = f"clocks of the ranks were lined up by collectives, to {clocks / 1e6:.2f} ms"
    if not late.is_clear:
        return [f"no rank comes later than the others in most steps ({aligned})"]
    first = found.traces[0]
    each = "steps" if first.num_steps == late.executions else "executions"
    return [
        f"rank {late.rank} comes {late.late_ms:.1f} ms later than the others in {late.times} of "
        f"{late.executions} {each} ({aligned})"
    ]


def _print_change(found: Report, other: Report) -> None:
    titles = (str(found.folder), str(other.folder), "change")
    table = table_of(None, ("ms of a step, mean of ranks",), titles)
    names = {"step": "step", **_COLUMNS, "communication": "comm. in all", "input": "input in all"}
    for name, shown in names.items():
        before, after = (
            sum(getattr(share, name) for share in each.shares) / len(each.shares)
            for each in (found, other)
        )
        change = f"{after - before:+.1f}" + (f" {after / before - 1:+.0%}" if before else "")
        table.add_row(shown, f"{before:.1f}", f"{after:.1f}", change)
    stdout().print(table)
