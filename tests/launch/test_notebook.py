from __future__ import annotations

import os
import stat
import sys

import pytest

import tfdist
from tfdist.errors import LaunchError, OptionError

pytestmark = pytest.mark.timeout(120)


def test_returns_what_rank_0_returned_and_shows_its_output(capfd):
    scale = 10

    def fn(value: int, *, offset: int) -> dict:
        import os

        print("hello of", os.environ["OMPI_COMM_WORLD_RANK"])
        return {"rank": os.environ["OMPI_COMM_WORLD_RANK"], "value": value * scale + offset}

    result = tfdist.notebook_launch(fn, 4, workers=2, offset=2)
    assert result == {"rank": "0", "value": 42}
    assert capfd.readouterr().out == "hello of 0\n"


def test_a_failing_rank_is_told_with_its_traceback():
    def fn():
        import os

        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            raise ValueError("no such flower")

    with pytest.raises(LaunchError, match=r"(?s)rank 1 ended with exit code 1.*no such flower"):
        tfdist.notebook_launch(fn)


def test_a_function_may_end_by_sys_exit():
    assert tfdist.notebook_launch(lambda: sys.exit(0)) is None
    with pytest.raises(LaunchError, match="ended with exit code 3"):
        tfdist.notebook_launch(lambda: sys.exit(3))


def test_the_function_travels_in_a_folder_for_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fn():
        import sys

        folder = sys.argv[1]
        return os.path.dirname(folder), stat.S_IMODE(os.stat(folder).st_mode)

    assert tfdist.notebook_launch(fn) == (str(tmp_path), 0o700)
    assert list(tmp_path.iterdir()) == []


def test_no_worker_at_all():
    with pytest.raises(OptionError, match="workers must be a whole number of at least 1"):
        tfdist.notebook_launch(print, workers=0)


def test_more_workers_than_slots():
    with pytest.raises(LaunchError, match="1000 workers for"):
        tfdist.notebook_launch(print, workers=1000)
