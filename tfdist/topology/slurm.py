"""A task's place in a Slurm job step, as ``srun`` tells it.

Only ``srun`` makes ranks. The step in which ``sbatch`` runs its script and the shell of ``salloc``
carry the job's number of tasks as well, but are one process each: for them there is no place here.

Variables: the manual of srun, "OUTPUT ENVIRONMENT VARIABLES". Those of the step are preferred; a
job's stand in where an older Slurm has no other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdist.topology.ports import addresses, first_port
from tfdist.topology.values import whole, wrong

# Above it are the batch, extern and interactive steps (SLURM_MAX_NORMAL_STEP_ID).
_LAST_STEP_ID = 0xFFFFFFEF
_MAX_TASKS = 1_000_000
_STEPS_APART = 31

_SIZE = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_COUNTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
# srun alone sets them.
MARKS = (_SIZE[0], _NODES[0])
_PORTS = "SLURM_STEP_RESV_PORTS"
_DISTRIBUTION = "SLURM_DISTRIBUTION"


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process as a task."""
    if not any(name in environ for name in MARKS):
        return False
    # The shell of salloc, which newer versions start as a step, is none of these.
    return _step(environ) <= _LAST_STEP_ID


def lacks_srun(environ: Mapping[str, str]) -> bool:
    """Whether this is the one process of a job that was given several tasks: srun is forgotten."""
    if is_task(environ) or not any(name in environ for name in _JOB):
        return False
    return environ.get("SLURM_NTASKS", "1") != "1"


def task(environ: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    """Returns the rank of a task, and "host:port" of each rank.

    Ports are those that Slurm has reserved (``srun --resv-ports``), else of the row that belongs to
    31 times the job's number plus the step's: see ``tfdist.topology.ports``.

    Raises:
        OptionError: a variable that cannot be read, or that contradicts another.
    """
    size = whole(environ, _first(environ, _SIZE), at_least=1)
    rank = whole(environ, "SLURM_PROCID")
    if rank >= size:
        raise wrong(f"SLURM_PROCID must be less than {size}, the tasks", environ, "SLURM_PROCID")
    hosts = _hosts_of_ranks(environ, size)
    _check_own_place(environ, hosts, rank)
    if environ.get(_PORTS):
        return rank, _with_reserved_ports(environ, hosts)
    job = whole(environ, _first(environ, _JOB))
    return rank, addresses(hosts, first_port(_STEPS_APART * job + _step(environ)))


def has_own_gpus(environ: Mapping[str, str]) -> bool:
    """Whether Slurm shows each task only the GPUs that it was given for itself."""
    binding = environ.get("SLURM_GPU_BIND", "")
    # GPUs by task are bound unless told otherwise, in whatever way.
    by_task = "SLURM_GPUS_PER_TASK" in environ and "none" not in binding
    return by_task or "per_task" in binding or "single" in binding


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts of Slurm's compressed form: "node[01-03,07],gpu-a[1-2]-x".

    Raises:
        ValueError: not of that form.
    """
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text.strip()):  # Not at commas within brackets.
        pieces = re.findall(r"\[[^\[\]]+\]|[^\[\]\s]+", part)
        if not part or "".join(pieces) != part:
            raise ValueError(part)
        choices = [
            _expand_ranges(piece[1:-1]) if piece.startswith("[") else [piece] for piece in pieces
        ]
        hosts += ("".join(chosen) for chosen in itertools.product(*choices))
    return hosts


def expand_counts(text: str) -> list[int]:
    """Returns the tasks of each node: "2(x3),1" is [2, 2, 2, 1].

    Raises:
        ValueError: not of that form.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip(), re.ASCII)
        if found is None or int(found[1]) < 1:
            raise ValueError(part)
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _step(environ: Mapping[str, str]) -> int:
    name = _first(environ, _STEP)
    return whole(environ, name) if environ.get(name) else 0


def _expand_ranges(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
        if found is None:
            raise ValueError(part)
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last < first + _MAX_TASKS:
            raise ValueError(part)
        numbers += (str(number).zfill(len(found[1])) for number in range(first, last + 1))
    return numbers


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Returns the first of the names that is there; the first of all where none is."""
    return next((name for name in names if environ.get(name)), names[0])


def _hosts_of_ranks(environ: Mapping[str, str], size: int) -> list[str]:
    nodes_name, counts_name = _first(environ, _NODES), _first(environ, _COUNTS)
    rule = f"{nodes_name} must list hosts as node[01-03,07],other"
    nodes = _expanded(environ, nodes_name, expand_hosts, rule)
    if len(nodes) == 1:
        return nodes * size
    rule = f"{counts_name} must list the tasks of each node as 2(x3),1"
    counts = _expanded(environ, counts_name, expand_counts, rule)
    if len(counts) != len(nodes) or sum(counts) != size:
        raise wrong(
            f"{counts_name} must tell the tasks of {len(nodes)} nodes, {size} in all",
            environ,
            counts_name,
            mend="Start the tasks with one srun, without the parts of a heterogeneous job",
        )
    return list(_dealt(environ, nodes, counts))


def _expanded(
    environ: Mapping[str, str], name: str, expand: Callable[[str], list[Any]], rule: str
) -> list[Any]:
    try:
        return expand(environ.get(name, "").strip())
    except ValueError as error:
        raise wrong(rule, environ, name) from error


def _dealt(environ: Mapping[str, str], nodes: list[str], counts: list[int]) -> Iterator[str]:
    """Yields the node of each rank, in the order of the step's distribution."""
    how = re.split("[:,]", environ.get(_DISTRIBUTION, "block").lower())[0]
    blocks = {"block": max(counts), "unknown": max(counts), "cyclic": 1}
    if how == "plane":
        blocks[how] = whole(environ, "SLURM_DIST_PLANESIZE", at_least=1)
    if how not in blocks:
        raise wrong(
            f"{_DISTRIBUTION} must be block, cyclic or plane",
            environ,
            _DISTRIBUTION,
            mend="Start the tasks with srun --distribution=block",
        )
    left = dict(enumerate(counts))
    while any(left.values()):
        for node, count in left.items():
            taken = min(blocks[how], count)
            left[node] -= taken
            yield from [nodes[node]] * taken


def _check_own_place(environ: Mapping[str, str], hosts: list[str], rank: int) -> None:
    """What Slurm says of this very task must be what was concluded for it."""
    if "SLURM_LOCALID" not in environ:
        return
    local = hosts[:rank].count(hosts[rank])
    if whole(environ, "SLURM_LOCALID") != local:
        raise wrong(
            f"rank {rank} must be number {local} on {hosts[rank]}, by the nodes of this step and "
            f"{_DISTRIBUTION}={environ.get(_DISTRIBUTION, 'block')}",
            environ,
            "SLURM_LOCALID",
            mend="Start the tasks with srun --distribution=block",
        )


def _with_reserved_ports(environ: Mapping[str, str], hosts: list[str]) -> tuple[str, ...]:
    rule = f"{_PORTS} must list ports as 12000-12003"
    ports = _expanded(environ, _PORTS, _expand_ranges, rule)
    most = max(hosts.count(host) for host in set(hosts))
    if len(ports) < most:
        raise wrong(
            f"{_PORTS} must hold a port for each task of a node, {most}",
            environ,
            _PORTS,
            mend=f"Start the tasks with srun --resv-ports={most}",
        )
    return tuple(f"{host}:{ports[hosts[:rank].count(host)]}" for rank, host in enumerate(hosts))
