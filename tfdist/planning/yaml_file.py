"""Tables in YAML that a user may replace or extend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfdist.errors import DataError, OptionError


def read_yaml(path: Path) -> Any:
    """Returns what a table in YAML holds. Raises TfdistError where it cannot be read."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            f"{path} must be readable",
            received=error.strerror,
            mend="Give a file that exists and can be read, or leave it out",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"{path} must be YAML",
            received=f"an error: {error}",
            mend="Correct the line that the error names",
        ) from None
