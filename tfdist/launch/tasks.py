"""Ranks that tfdist starts itself: ``python -m tfdist.launch.tasks PLAN -- COMMAND...``.

PLAN is JSON, see ``Plan``. Each task of a TensorFlow cluster here is a process of its own, with its
TF_CONFIG; those of another host are started by this same program there, through ssh.

So are Gloo's ranks on this machine alone. horovodrun itself passes the whole environment in the
argument of a shell, for all users to see, and the server at which its ranks meet believes whoever
calls, on all interfaces. Here they know each other by a secret, on the loopback interface.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field

from tfdist import topology
from tfdist.launch import programs
from tfdist.launch.rank_output import Part, TaggedProcess, asked_to_end, run_together
from tfdist.launch.ssh import OverSsh


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which tasks there are, and where.

    Attributes:
        tasks: (role, "host:port") of each rank; none where the ranks are Gloo's.
        here: ranks that this machine runs.
        elsewhere: host -> its ranks, for those that ssh reaches.
        cores: of each rank here, the numbers of those that are its own; empty where all share them.
        may_be_lost: ranks whose sudden end does not end the job.
    """

    here: list[int]
    tasks: list[tuple[str, str]] = field(default_factory=list)
    elsewhere: dict[str, list[int]] = field(default_factory=dict)
    cores: list[list[int]] = field(default_factory=list)
    may_be_lost: list[int] = field(default_factory=list)

    def command(self, command: list[str]) -> list[str]:
        """Returns what runs ``command`` as these tasks."""
        plan = json.dumps(dataclasses.asdict(self))
        return [sys.executable, "-m", "tfdist.launch.tasks", plan, "--", *command]

    def part_of(self, host: str) -> Plan:
        """Returns what another host does of it, where the numbers of the cores are not known."""
        return dataclasses.replace(self, here=self.elsewhere[host], elsewhere={}, cores=[])


def main() -> int:
    plan, command = Plan(**json.loads(sys.argv[1])), sys.argv[3:]
    assert sys.argv[2] == "--", sys.argv
    asked = asked_to_end()
    places = enumerate(_environments(plan))
    parts: list[Part] = [_start(plan, place, command, own) for place, own in places]
    environ = programs.exported(os.environ)
    parts += [
        OverSsh(host, ranks, plan.part_of(host).command(command), environ)
        for host, ranks in plan.elsewhere.items()
    ]
    return run_together(parts, asked)


def _environments(plan: Plan) -> list[dict[str, str]]:
    """Returns what tells each rank here its place among the others."""
    if plan.tasks:
        return [{"TF_CONFIG": topology.tf_config(plan.tasks, rank)} for rank in plan.here]
    # Here, because few jobs need a server.
    from tfdist.launch.gloo_store import ON_LOOPBACK, GlooStore, place

    meeting, size = GlooStore().variables(0) | ON_LOOPBACK, len(plan.here)
    return [meeting | place("localhost", rank, size, is_alone=False) for rank in plan.here]


def _start(plan: Plan, place: int, command: list[str], environ: dict[str, str]) -> TaggedProcess:
    rank = plan.here[place]
    own = [f"--cores={','.join(map(str, plan.cores[place]))}"] if plan.cores else []
    return TaggedProcess(
        programs.rank_command(command, *own),
        {**os.environ, **environ},
        rank,
        may_be_lost=rank in plan.may_be_lost,
    )


if __name__ == "__main__":
    sys.exit(main())
