"""TFRecord shards: written once, checked to the byte, read in any part and any order.

Nothing is imported before it is used: writing and checking need no TensorFlow.
"""

from __future__ import annotations

import importlib

_LAZY = {
    "write": "tfdist.records.writing.writer",
    "adopt": "tfdist.records.adopting.adopt",
    "check": "tfdist.records.format.checking",
    "load_manifest": "tfdist.records.format.manifest",
    "read": "tfdist.records.reading.reader",
    "open_records": "tfdist.records.reading.reader",
    "open_clients": "tfdist.records.clients.collection",
    "explain_read_error": "tfdist.records.reading.reader",
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
