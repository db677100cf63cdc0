"""TensorFlow is imported in a process of its own: this one may have it already."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc
from tfdist.compat import import_tensorflow
tf = import_tensorflow()
assert tf.reduce_sum(tf.ones(3)).numpy() == 3
assert gc.isenabled()
print(gc.get_freeze_count())
"""


def test_the_collector_runs_on_and_leaves_tensorflow_alone():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) > 100_000
