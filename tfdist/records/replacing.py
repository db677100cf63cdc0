"""A file that is written whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from tfdist.errors import OptionError, cannot_write


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path`` that takes its place when all went well.

    Raises:
        OptionError: see ``check_replaceable``.
        WriteError: it cannot be written, as on a full disk; what was there is untouched.
    """
    check_replaceable(path)
    # The suffix stays last: some writers choose their format by it. The number is this call's:
    # threads share that of their process, and so may hosts of one folder.
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().int % 10**8}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_replaceable(path: Path) -> None:
    """Raises OptionError for a pipe or a device: what is written takes the place of what is there,
    as of /dev/null for all programs."""
    if os.path.exists(path) and not (path.is_file() or path.is_dir()):
        raise OptionError(
            "what is written must be a regular file",
            received=f"{path}, a pipe or a device",
            mend="Name another file",
        )
