from __future__ import annotations

import os
import subprocess
import sys

import pytest
import tensorflow as tf
import zygote


@pytest.mark.skipif("config.option.cold_starts")
def test_programs_start_warm_though_this_process_has_imported_tensorflow(tmp_path):
    """It adds to the environment that they are given."""
    assert tf.__name__ in sys.modules
    assert zygote.VARIABLE in os.environ
    (tmp_path / "program.py").write_text("import sys; print('tensorflow' in sys.modules)")
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "True\n"
