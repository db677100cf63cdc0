"""A file that is written whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from tfdist.errors import cannot_write


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path`` that takes its place when all went well.

    Raises:
        WriteError: it cannot be written, as on a full disk; what was there is untouched.
    """
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
