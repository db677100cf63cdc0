"""Tables in YAML that a user may replace or extend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tfdist.errors import DataError, OptionError

_NO_KEYS = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would take the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        # Before what is merged comes in ("<<"), whose keys a mapping's own may replace.
        own = [key for key, _ in node.value if key.tag not in _NO_KEYS]
        keys = [self.construct_object(key, deep=True) for key in own]
        twice = next((key for position, key in enumerate(keys) if key in keys[:position]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} twice", node.start_mark)
        return node


def load(text: str) -> Any:
    """Returns what YAML holds.

    Raises:
        yaml.YAMLError: it is none, has a key twice, or is nested without end.
    """
    try:
        return _Loader(text).get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError(str(error)) from None
    except (ValueError, LookupError, AttributeError) as error:
        # What looks like a date, or is said to be a number, and is none: 2024-02-30.
        raise yaml.YAMLError(f"a value that cannot be: {error}") from None


def read_yaml(path: Path) -> Any:
    """Returns what a table in YAML holds. Raises TfdistError where it cannot be read."""
    try:
        return load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            f"{path} must be readable",
            received=error.strerror,
            mend="Give a file that exists and can be read, or leave it out",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} must be YAML",
            received=f"an error: {error}",
            mend="Correct the line that the error names",
        ) from None
