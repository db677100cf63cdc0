"""``tfdist trace`` as a user runs it, on traces of known numbers."""

from __future__ import annotations

import json

import pytest
from made_traces import Made, write

_STEPS = [(10, 100, 3, 3), (110, 200, 4, 4)]


def _rank(late: float) -> Made:
    compute = [("net/dense/MatMul", "MatMul", at, at + 20 + late) for at in (10, 110)]
    meets = [("sum", "HorovodAllreduce", at + 20 + late, at + 70) for at in (10, 110)]
    return Made(_STEPS, compute, meets, layers=["dense"])


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run", [_rank(0), _rank(30)])


def test_the_table_names_parts_layers_and_the_straggler(tfdist, run):
    code, out, err = tfdist("trace", "run")
    assert (code, err) == (0, "")
    assert "run: horovod, steps 3 to 4, ms of a step" in out
    rows = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row[1:5]] for row in rows[:2]] in (
        [["0", "95.0", "20.0  21%", "20.0  21%"], ["1", "95.0", "50.0  53%", "20.0  21%"]],
        # The head of a table has two lines where names do not fit.
        [["", "", "", "exposed"], ["rank", "step", "compute", "comm."]],
    )
    assert "rank 1 comes 30.0 ms later than the others in 2 of 2 steps" in out
    assert "│ dense" in out


def test_json_has_the_same_numbers(tfdist, run):
    code, out, _ = tfdist("trace", "run", "--json")
    assert code == 0
    trace = json.loads(out.splitlines()[-1])["trace"]
    assert [each["compute_ms"] for each in trace["ranks"]] == [20, 50]
    assert [each["for_rank_ms"] for each in trace["ranks"]] == [30, 0]


def test_two_runs_are_compared_drawn_and_written(tfdist, run, tmp_path):
    write(tmp_path / "faster", [_rank(0), _rank(0)])
    asked = ("--compare", "faster", "--plot", "a.png", "--perfetto", "a.json.gz")
    code, out, err = tfdist("trace", "run", *asked)
    assert (code, err) == (0, "")
    assert "no rank comes later than the others in most steps" in out
    (row,) = [line for line in out.splitlines() if line.startswith("│ compute")]
    assert row.replace("│", " ").split() == ["compute", "35.0", "20.0", "-15.0", "-43%"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.json.gz").stat().st_size


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["."], "found no trace in it. Train with --profile steps=10:20."),
        (["none"], "found no such folder."),
        (["s3://bucket/run"], "must be a folder of this machine"),
        (["run", "--plot", "a.pdf"], "a chart must be written to a .png file"),
        (["run", "--perfetto", "a.json"], "--perfetto must be a .json.gz file"),
    ],
)
def test_mistakes_are_one_line(tfdist, run, arguments, said):
    code, out, err = tfdist("trace", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_damaged_files_are_one_line(tfdist, run):
    path = next(run.rglob("rank-1.xplane.pb"))
    whole = path.read_bytes()
    for content in (b"", whole[:-3], b"\xff" * 30, whole[: len(whole) // 2]):
        path.write_bytes(content)
        code, _, err = tfdist("trace", "run")
        assert (code, err.count("\n")) == (2, 1)
        assert "must be" in err
        assert "Trace the steps again" in err
