"""``tfdist plan``: its tables, its mistakes, and what it tells programs."""

from __future__ import annotations

import json

import pytest

import tfdist as package
from tfdist.errors import LaunchError, ModelError, OptionError
from tfdist.planning.needs import Needs
from tfdist.runs import largest_batch, planning
from tfdist.runs.largest_batch import Try


def _needs_of(model, asked, *, rows, on_gpus, on_event):
    """A model of 100 million weights, trained with Adam, instead of a traced one."""

    def needs(strategy, options, devices):
        if strategy == "mesh":
            return ModelError("a model must be Functional", received="another", mend="Make it so")
        parts = devices if strategy == "pipeline" else 1
        return Needs(
            strategy=strategy,
            options=options,
            devices=devices,
            weights=int(4e8 / parts),
            gradients=int(4e8 / parts),
            slots=int(8e8 / parts),
            fixed=0.0,
            per_row=1e8 / devices,
            flops=0.0,
            flops_per_row=1e11,
            summed=int(4e8),
        )

    return [needs(*each) for each in asked]


@pytest.fixture
def plan(tfdist, model_file, monkeypatch):
    monkeypatch.setattr(planning, "find_needs", _needs_of)

    def run(*options: str):
        return tfdist("plan", "--model", f"{model_file}:mlp", *options)

    return run


def test_what_people_read(plan):
    code, out, err = plan("--devices", "g5.12xlarge:2", "--global-batch-size", "64")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("2 hosts with 4 x a10g each, 64 rows a step")
    assert all(line.count("│") == 10 for line in lines if line.startswith("│")), "9 columns"
    (taken,) = (line for line in lines if line.startswith("take"))
    assert "times as fast as one device" in taken
    assert "refused mesh model=4 replicas=" in out
    assert "a model must be Functional, but found another. Make it so." in out
    assert "price: ml.g5.12xlarge on demand, 7.09 USD an hour" in out
    assert "computing: device file, 35 TFLOP/s in float32, 70 mixed, times 40%, a default" in out


def test_what_programs_read(plan):
    code, out, _ = plan("--devices", "g5.12xlarge:2", "--json")
    assert code == 0
    told = json.loads(out.splitlines()[-1])["plan"]
    assert told["global_batch_size"] == 128
    row = told["rows"][0]
    assert (row["strategy"], row["options"], row["devices"]) == ("single", {}, 1)
    assert row["peak_bytes"] == pytest.approx(1.6e9 + 128 * 1e8)
    assert row["rows_per_s"] == pytest.approx(0.4 * 35e12 / 1e11)
    one = told["scaling"][0]
    assert one["usd_per_million_rows"] == pytest.approx(7.09 / 3600 * 1e6 / 140)
    kilowatts = 1.313 * 0.2448 * 1.15
    assert one["kg_co2_per_million_rows"] == pytest.approx(kilowatts / 3600 * 1e6 / 140)


def test_a_price_of_ones_own(plan):
    code, out, _ = plan("--devices", "p100:4", "--usd-per-hour", "3.6", "--json")
    assert code == 0
    told = json.loads(out.splitlines()[-1])["plan"]
    assert told["scaling"][0]["usd_per_million_rows"] == pytest.approx(1e3 / (0.4 * 10.6e12 / 1e11))
    assert told["scaling"][0]["kg_co2_per_million_rows"] is None


def test_a_chart(plan, tmp_path):
    code, out, _ = plan("--devices", "v100:4", "--plot", "plan.png")
    assert code == 0
    assert "chart   plan.png" in out
    assert (tmp_path / "plan.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "h10:8"], "Did you mean 'h100'"),
        (["--devices", "h100:8", "--plot", "plan.svg"], "must be written to a .png file"),
        (["--devices", "h100:8", "--region", "mars"], "the region of the carbon table must be"),
        (["--devices", "h100:8", "--device-file", "no.yaml"], "no.yaml must be readable"),
        (["--devices", "h100:8", "--profile", "data"], "and 1 GPU here, of 2 that it takes"),
        (["--devices", "h100:8", "--find-batch"], "and 1 GPU here, of 8 that it takes"),
        (["--devices", "cpu:2x2", "--find-batch"], "--find-batch must run on a machine with"),
    ],
)
def test_a_mistake_is_one_line(plan, options, message, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code, out, err = plan(*options)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_plan_of_minutes_tells_how_far_it_is(plan, monkeypatch):
    def found(model, asked, *, on_event, **more):
        on_event(3, {"event": "needs"})
        return _needs_of(model, asked, on_event=on_event, **more)

    monkeypatch.setattr(planning, "find_needs", found)
    _, out, _ = plan("--devices", "v100:4", "--json")
    told = [json.loads(line) for line in out.splitlines()]
    assert [each["event"] for each in told] == ["start", "progress", "end"]
    assert (told[1]["what"], told[1]["done"], told[1]["unit"]) == ("tracing", 1, "steps")


def test_what_every_row_says_is_the_models_mistake(plan, monkeypatch):
    mistake = ModelError("model.py must define mlp", received="nothing", mend="Write it there")
    monkeypatch.setattr(planning, "find_needs", lambda model, asked, **_: [mistake] * len(asked))
    code, out, err = plan("--devices", "v100:4")
    assert (code, out) == (2, "")
    assert err == "tfdist: model.py must define mlp, but found nothing. Write it there.\n"


def test_several_trainings(tfdist, tmp_path):
    (tmp_path / "jobs.yaml").write_text(
        "hosts: {x: 'v100:4', y: 'v100:4'}\n"
        "jobs: {a: {devices: 3, memory_gib: 5}, b: {devices: 3, memory_gib: 5},\n"
        "  c: {devices: 2, memory_gib: 5}, d: {devices: 1, memory_gib: 1}}"
    )
    code, out, err = tfdist("plan", "--jobs", "jobs.yaml")
    assert (code, err) == (0, "")
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    by_name = {row[0].strip(): [cell.strip() for cell in row[2:]] for row in rows}
    assert by_name["c"][0] == "x: 1, y: 1"
    assert by_name["a"][2] == "d starts on x: 1; move c to x: 2"
    assert by_name["d"] == ["waits: no room", "", ""]
    code, out, _ = tfdist("plan", "--jobs", "jobs.yaml", "--json")
    told = json.loads(out.splitlines()[-1])
    assert (told["waiting"], told["jobs"]["a"]["hosts"]) == (["d"], {"x": 3})
    assert told["endings"][0] == {"job": "a", "starts": {"d": {"x": 1}}, "moves": {"c": {"x": 2}}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "must have --model and --devices, or --jobs, but found neither"),
        (["--model", "model.py:mlp"], "but found one of the two"),
        (["--jobs", "none.yaml"], "none.yaml must be readable"),
        (["--jobs", "none.yaml", "--devices", "t4"], "but found --devices. Leave"),
        (
            ["--jobs", "none.yaml", "--plot", "a.png", "--find-batch"],
            "--find-batch and --plot",
        ),
    ],
)
def test_what_goes_together(tfdist, options, message):
    code, _, err = tfdist("plan", *options)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_batch_that_cannot_be_found_leaves_the_plan(plan, monkeypatch):
    def fail(*given, on_try, **options):
        on_try(Try(rows=32, fits=True))
        raise LaunchError("processes must start", received="none")

    monkeypatch.setattr(largest_batch, "find_batch", fail)
    code, out, _ = plan("--devices", "cpu:1", "--find-batch")
    assert code == 0
    assert "tried   a global batch of 32 fits" in out
    assert "tried   nothing found: processes must start, but found none." in out


def test_a_rank_makes_no_plan(model_file, monkeypatch):
    monkeypatch.setenv("TFDIST_RANK_PROGRAM", "1")
    with pytest.raises(OptionError, match=r"tfdist\.plan must be called by the program"):
        package.plan(f"{model_file}:mlp", "v100:4")


def test_in_python(model_file, monkeypatch):
    monkeypatch.setattr(planning, "find_needs", _needs_of)
    made = package.plan(f"{model_file}:mlp", "v100:4", global_batch_size=64)
    assert made.advice.row.candidate.strategy == "mirrored"
    assert str(made) == made.advice.reason
    with pytest.raises(OptionError, match="global_batch_size must be"):
        package.plan(f"{model_file}:mlp", "v100:4", global_batch_size=0)
    with pytest.raises(ModelError, match=r"no file none\.py"):
        package.plan("none.py:mlp", "v100:4")


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_a_traced_model_on_measured_processes(run_cli, shards, model_file):
    done = run_cli(
        *("plan", "--model", f"{model_file}:mlp", "--devices", "cpu:2", "--profile", shards),
        *("--global-batch-size", 32, "--find-batch", "--json"),
        timeout_s=900,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])["plan"]
    assert any("at the same time: measured, g = " in line for line in told["sources"])
    single = told["rows"][0]
    # 8 x 16 and 16 x 3 weights and 19 of biases, once for gradients and once for momentum.
    assert single["peak_bytes"] > 3 * 4 * (8 * 16 + 16 * 3 + 19)
    assert single["speed_up"] == 1
    assert told["found_batch"] >= 32


def test_check_shows_told_beside_measured(plan, monkeypatch):
    def run(module, config, where, on_event):
        if config["asked"][1]:
            raise ModelError("a model must be taken", received="none", mend="Take one")
        on_event(0, {"event": "measured", "most": 10**9})

    monkeypatch.setattr(planning.ranks, "run", run)
    code, out, _ = plan("--devices", "cpu:2", "--global-batch-size", "16", "--check", "--json")
    assert code == 1  # A row failed.
    told = json.loads(out.splitlines()[-1])["plan"]
    fitting = [row for row in told["rows"] if row.get("fits")]
    assert [check["measured"] for check in told["checks"][:1]] == [10**9]
    assert told["checks"][0]["told"] == fitting[0]["peak_bytes"]
    assert told["checks"][1]["measured"] is None
    assert "a model must be taken" in told["checks"][1]["why"]
    assert not [check for check in told["checks"] if "parameter_server" in check["name"]]


def test_check_is_of_this_machine(plan):
    code, out, err = plan("--devices", "h100:8", "--check")
    assert (code, out) == (2, "")
    assert "--check must be of a plan for this machine's CPU" in err
