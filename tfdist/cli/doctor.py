"""``tfdist doctor``: which engines work here."""

from __future__ import annotations

import dataclasses
import platform

import click
from rich.console import Console

from tfdist.cli import voice
from tfdist.cli.console import plain_table, stdout
from tfdist.compat.versions import keras_version, tensorflow_version
from tfdist.launch import engines


@click.command("doctor", cls=voice.Answering, epilog="Example: tfdist doctor --run")
@click.option("--run", is_flag=True, help="Take a real step on two workers with each engine.")
def command(run: bool) -> int:
    """Show which engines work here, and how to mend the rest.

    Each engine is imported in a process of its own. Exit code 1 when one does not work. --run also
    tells how much slower cores are when all of them work at once.
    """
    progress = Console(stderr=True)
    findings = []
    for engine in engines.all_engines():
        with progress.status(f"trying {engine.name}"):
            findings.append(engines.probe(engine, run=run))
    cores = None
    if run:
        with progress.status("trying all cores at once"):
            cores = engines.cores_at_once()
    gpus = sorted({gpu for finding in findings for gpu in finding.gpus})
    ok = all(finding.ok for finding in findings)
    voice.answer(
        {
            "ok": ok,
            "tensorflow": tensorflow_version(),
            "keras": keras_version(),
            "python": platform.python_version(),
            "gpus": gpus,
            "cores": cores and {"count": cores[0], "at_once": cores[1]},
            "engines": [{**dataclasses.asdict(finding), "ok": finding.ok} for finding in findings],
        }
    )
    _print_table(findings, gpus)
    if cores is not None:
        count, share = cores
        stdout().print(
            f"{count} cores at once: each does {share:.2f} of what it does alone, so that ranks on "
            "a core each are hardly more efficient than that here"
        )
    return 0 if ok else 1


def _print_table(findings: list[engines.Finding], gpus: list[str]) -> None:
    table = plain_table("engine", "version", "imports", "runs", "note")
    for finding in findings:
        table.add_row(
            finding.engine,
            finding.version or "missing",
            _word(finding.imports),
            _word(finding.runs),
            finding.note,
        )
    console = stdout()
    console.print(table)
    told = (
        f"TensorFlow {tensorflow_version()}",
        f"Keras {keras_version()}",
        f"Python {platform.python_version()}",
    )
    console.print(f"\n{'; '.join(told)}; GPUs: {', '.join(gpus) or 'none'}")
    for finding in findings:
        if not finding.ok:
            problem = finding.problem.rstrip(".")
            console.print(f"{finding.engine}: {problem}. {finding.mend}.")


def _word(answer: bool | None) -> str:
    return {True: "yes", False: "NO", None: "not tried"}[answer]
