"""One rank of simulated hosts: ``python -m tfdist.aws.rehearsal.host_rank DIR``.

Real hosts need a network and ssh. Here all ranks run on this machine, and each takes the folder of
the host that it would be on, ``DIR/algo-1`` and so on, as its /opt/ml: the toolkit makes the
environment and the arguments from it, as it would there.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import MutableMapping
from pathlib import Path

from tfdist import topology

_RANK, _SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
_LOCAL_RANK, _LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"


def host_folders(folder: Path) -> list[Path]:
    """Returns the folders of the simulated hosts, in their order."""
    return sorted(folder.glob("algo-*"), key=lambda path: int(path.name.split("-")[1]))


def take_host(environ: MutableMapping[str, str], hosts: int) -> int:
    """Makes ``environ`` that of a rank on one of ``hosts`` hosts; returns the host's number."""
    if _SIZE not in environ:  # A process a host, with a TF_CONFIG.
        return topology.from_environ(environ).rank
    per_host = int(environ[_SIZE]) // hosts
    host, local_rank = divmod(int(environ[_RANK]), per_host)
    environ[_LOCAL_RANK], environ[_LOCAL_SIZE] = str(local_rank), str(per_host)
    return host


def main() -> None:
    folders = host_folders(Path(sys.argv[1]))
    base = folders[take_host(os.environ, len(folders))]
    os.environ["SAGEMAKER_BASE_DIR"] = str(base)  # Read when the toolkit is imported.
    from sagemaker_training import environment

    described = environment.Environment()
    os.environ.update(described.to_env_vars())
    script = base / "code" / described.user_entry_point
    os.chdir(script.parent)
    sys.argv = [str(script), *map(str, described.to_cmd_args())]
    # The shipped tfdist, as in a container, and not the one that runs this rehearsal.
    sys.path.insert(0, str(script.parent))
    for name in [name for name in sys.modules if name.split(".")[0] == "tfdist"]:
        del sys.modules[name]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
