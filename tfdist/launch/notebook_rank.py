"""One rank of ``notebook_launch``: ``python -m tfdist.launch.notebook_rank FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle

from tfdist import topology


def main() -> None:
    folder = Path(sys.argv[1])
    fn, args, kwargs = cloudpickle.loads((folder / "task.pkl").read_bytes())
    result = fn(*args, **kwargs)
    if topology.current().is_chief:
        (folder / "result.pkl").write_bytes(cloudpickle.dumps(result))


if __name__ == "__main__":
    main()
