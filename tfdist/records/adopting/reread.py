"""Changing how records are read: their manifest alone is written anew."""

from __future__ import annotations

import contextlib
import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfdist.errors import cannot_write
from tfdist.records.format.manifest import MANIFEST_NAME, Manifest
from tfdist.records.format.readings import with_readings
from tfdist.records.format.schema import Reading, Schema

#: Takes a choice back: what is stored is read as it is.
AS_STORED = "none"
_USUAL = Reading()


def changed(
    schema: Schema, resize: Any, fit: str | None, color: str | None, max_length: Any
) -> Schema:
    """Returns the schema with other readings; see ``readings.with_readings``.

    What is "none" is taken back, what is None stays as it is.

    Raises:
        OptionError, DataError: a choice that cannot be.
    """
    back: dict[str, Any] = {}
    if resize == AS_STORED:
        back |= {"size": _USUAL.size, "fit": _USUAL.fit}
    if color == AS_STORED:
        back["channels"] = _USUAL.channels
    if max_length == AS_STORED:
        back["length"] = _USUAL.length
    if back:
        features = (replace(f, reading=replace(f.reading, **back)) for f in schema.features)
        schema = Schema(tuple(features))
    return with_readings(
        schema,
        resize=None if resize == AS_STORED else resize,
        fit=fit,
        color=None if color == AS_STORED else color,
        max_length=None if max_length == AS_STORED else max_length,
    )


def put(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest of a folder whole, in the place of one that was there.

    Raises:
        WriteError: it cannot be written; what was there is untouched.
    """
    path = folder / MANIFEST_NAME
    partial = folder / f".{MANIFEST_NAME}-{uuid.uuid4().hex}"
    try:
        with open(partial, "x", encoding="utf-8") as file:
            file.write(manifest.to_text())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
