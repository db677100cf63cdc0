"""One rank of ``notebook_launch``: ``python -m tfdist.launch.notebook_rank FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle

from tfdist import topology


def main() -> None:
    folder = Path(sys.argv[1])
    fn, args, kwargs = cloudpickle.loads((folder / "task.pkl").read_bytes())
    try:
        result = fn(*args, **kwargs)
    except SystemExit as end:
        if end.code:
            raise
        result = None  # It has ended well, and has nothing to return.
    if topology.current().is_chief:
        (folder / "result.pkl").write_bytes(cloudpickle.dumps(result))


if __name__ == "__main__":
    main()
