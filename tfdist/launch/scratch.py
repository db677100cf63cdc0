"""The folders for temporary files of one job, which go with it however it ends.

TensorFlow's autograph and Open MPI remove their files only where they end by themselves. In a
folder that is the job's alone they can be told from those of others, and from the user's own, which
stay where they are.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Mapping

_PREFIX = "tfdist-job-"
# Named by autograph, Open MPI, tfdist.
_OURS = ("__autograph_generated_file*", "ompi.*", "tfdist-*")
_MEMORY = "/dev/shm"
# Names the folder for the memory that Open MPI's ranks share.
_SHARED = "OMPI_MCA_btl_vader_backing_directory"


class Scratch:
    """The folders of one job.

    Attributes:
        paths: for other files, and for shared memory where this system has a place for it.
    """

    def __init__(self) -> None:
        self.paths = [tempfile.mkdtemp(prefix=_PREFIX)]
        with contextlib.suppress(OSError):
            self.paths.append(tempfile.mkdtemp(prefix=_PREFIX, dir=_MEMORY))

    def given_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns ``environ`` for the job."""
        folder, *memory = self.paths
        shared = {_SHARED: memory[0]} if memory else {}
        return {**shared, **environ, "TMPDIR": folder}


def remove(paths: list[str]) -> None:
    """Removes the folders of a job that has ended, but for what its user has left there."""
    folder, *memory = paths
    for path in memory:
        shutil.rmtree(path, ignore_errors=True)
    for pattern in _OURS:
        for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
            with contextlib.suppress(OSError):
                os.remove(path) if not os.path.isdir(path) else shutil.rmtree(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
