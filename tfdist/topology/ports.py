"""The ports of a TensorFlow cluster where no port can be tried out beforehand.

They lie in 12000..31999 (below the ports that systems give away by themselves): each number has 20
of them in a row, one for each task of a host.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST = 12000
PER_NUMBER = 20
NUMBERS = 1000


def first_port(number: int) -> int:
    """Returns the port of a host's first task; equal numbers, modulo 1000, give equal ports."""
    return FIRST + PER_NUMBER * (number % NUMBERS)


def addresses(hosts: Sequence[str], first: int) -> tuple[str, ...]:
    """Returns "host:port" of each task.

    Args:
        hosts: host of each task, in the order of ranks.
        first: port of each host's first task; its others have the next ones.
    """
    return tuple(f"{host}:{first + hosts[:rank].count(host)}" for rank, host in enumerate(hosts))
