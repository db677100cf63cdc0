"""TFRecord shards: written once, checked to the byte, read in any part and any order.

Nothing is imported before it is used: writing and checking need no TensorFlow.
"""

from __future__ import annotations

import importlib

_LAZY = {
    "write": "tfdist.records.writer",
    "check": "tfdist.records.faults",
    "load_manifest": "tfdist.records.manifest",
    "read": "tfdist.records.reader",
    "open_records": "tfdist.records.reader",
    "open_clients": "tfdist.records.clients",
    "explain_read_error": "tfdist.records.reader",
}

__all__ = list(_LAZY)


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'tfdist.records' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
