"""The place of a container among the hosts of a SageMaker training job: one process a host.

A process sees all GPUs of its host (SM_NUM_GPUS), so their number says nothing of its place. Under
SageMaker's MPI the ranks are mpirun's, and are found as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tfdist.topology.ports import FIRST
from tfdist.topology.values import parsed_json, wrong

_HOSTS, _CURRENT = "SM_HOSTS", "SM_CURRENT_HOST"
# The same as a file: what a container finds whose image has no training toolkit.
RESOURCE_CONFIG = "SM_RESOURCE_CONFIG"
MARKS = (_HOSTS, RESOURCE_CONFIG)
RESOURCE_CONFIG_FILE = Path("/opt/ml/input/config/resourceconfig.json")


def is_container(environ: Mapping[str, str]) -> bool:
    """Whether SageMaker has described the hosts of a training job."""
    return any(environ.get(name) for name in MARKS)


def task(environ: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    """Returns the rank of this host's process, and "host:port" of each rank.

    Hosts are ranked by their names, as SageMaker's toolkit ranks them. Ports count from 12000: the
    hosts belong to the job alone.

    Raises:
        OptionError: a variable that cannot be read, or a host that is not in the list.
    """
    name, hosts, current = _described(environ)
    if not isinstance(hosts, list) or not hosts or not all(isinstance(h, str) and h for h in hosts):
        raise wrong(f"{name} must list the names of the hosts", environ, name)
    hosts = sorted(hosts)
    if current is None and len(hosts) == 1:
        current = hosts[0]
    if current not in hosts:
        own = _CURRENT if name == _HOSTS else name
        raise wrong(f"{own} must name one of the hosts {', '.join(hosts)}", environ, own)
    listed = tuple(f"{host}:{FIRST + rank}" for rank, host in enumerate(hosts))
    return hosts.index(current), listed


def _described(environ: Mapping[str, str]) -> tuple[str, object, object]:
    """Returns the variable that lists the hosts, the hosts, and this one."""
    if environ.get(_HOSTS):
        return _HOSTS, parsed_json(environ, _HOSTS), environ.get(_CURRENT)
    config = parsed_json(environ, RESOURCE_CONFIG)
    if not isinstance(config, dict):
        raise wrong(f"{RESOURCE_CONFIG} must be a JSON object", environ, RESOURCE_CONFIG)
    return RESOURCE_CONFIG, config.get("hosts"), config.get("current_host")
