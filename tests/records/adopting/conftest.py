"""The tests here take files of others from ``tests/records_of_others.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
