"""Changing how records are read: their manifest alone is written anew."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfdist.errors import cannot_write
from tfdist.records.format.manifest import MANIFEST_NAME, Manifest
from tfdist.records.format.readings import with_readings
from tfdist.records.format.schema import AS_STORED, Schema

#: Takes a choice back: what is stored is read as it is.
_BACK = "none"
# What the choices that can be taken back say of how a feature is read.
_FIELDS = {"resize": ("size", "fit"), "color": ("channels",), "max_length": ("length",)}


def read_as_said(schema: Schema, said: Mapping[str, Any]) -> Schema:
    """Returns the schema with other readings.

    Args:
        said: the options of ``readings.with_readings``. What is "none" is taken back, what is None
            stays as it is.

    Raises:
        OptionError, DataError: a choice that cannot be.
    """
    taken = [option for option in _FIELDS if said[option] == _BACK]
    if taken:
        usual = {name: getattr(AS_STORED, name) for option in taken for name in _FIELDS[option]}
        features = (replace(f, reading=replace(f.reading, **usual)) for f in schema.features)
        schema = Schema(tuple(features))
    return with_readings(schema, **{**said, **dict.fromkeys(taken)})


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
