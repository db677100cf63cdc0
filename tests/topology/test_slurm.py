"""The place of a Slurm task, from environments as srun, sbatch and salloc leave them."""

from __future__ import annotations

import pytest

from tfdist.errors import OptionError
from tfdist.topology import from_environ, slurm

# `srun` in an sbatch script of Slurm 23.02: 2 nodes, 2 tasks on each. What concerns no place is
# left out. The job's own variables are there beside those of the step.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_NODELIST": "node[01-02]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_LAUNCHER_PORT": "38421",
    "SLURM_SRUN_COMM_HOST": "10.1.0.5",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "2,3",
    "SLURM_LAUNCH_NODE_IPADDR": "10.1.0.5",
}
# Slurm 2.6: the step has its nodes and tasks, the job none of the newer names.
OLD = {
    "SLURM_JOBID": "90",
    "SLURM_NODELIST": "n1,n7",
    "SLURM_NPROCS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_STEPID": "1",
    "SLURM_STEP_NODELIST": "n1,n7",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
# The script of `sbatch -n 4 -N 2` itself: one process, though it is told of four tasks.
BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "ENVIRONMENT": "BATCH",
}
# salloc's shell, on the login node and (LaunchParameters=use_interactive_step) on the first node.
SALLOC = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "a[1-2]"}
INTERACTIVE = SALLOC | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "a1",
    "SLURM_PROCID": "0",
}


def step(nodes: str, counts: str, size: int, rank: int, **others: str) -> dict[str, str]:
    changes = {
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_PROCID": str(rank),
        **others,
    }
    kept = {name: value for name, value in STEP.items() if name != "SLURM_LOCALID"}
    return kept | changes


def hosts(environ: dict[str, str]) -> list[str]:
    return [address.partition(":")[0] for address in from_environ(environ).addresses]


def test_a_task_of_srun():
    place = from_environ(STEP)
    assert (place.launcher, place.role) == ("slurm", "worker")
    assert (place.world_size, place.rank) == (4, 2)
    assert (place.local_rank, place.local_size) == (0, 2)
    # 31 * 4711 + 0 = 146041; 12000 + 20 * 41.
    assert place.addresses == ("node01:12820", "node01:12821", "node02:12820", "node02:12821")


def test_an_old_slurm():
    place = from_environ(OLD)
    assert (place.world_size, place.rank, place.local_rank, place.local_size) == (3, 2, 0, 1)
    assert [a.partition(":")[0] for a in place.addresses] == ["n1", "n1", "n7"]


def test_all_ranks_conclude_the_same_addresses():
    local = {"0": "0", "1": "1", "2": "0", "3": "1"}
    told = {
        from_environ(STEP | {"SLURM_PROCID": rank, "SLURM_LOCALID": own}).addresses
        for rank, own in local.items()
    }
    assert len(told) == 1


@pytest.mark.parametrize("environ", [BATCH, SALLOC, INTERACTIVE], ids=["batch", "salloc", "step"])
def test_what_srun_did_not_start_is_one_process(environ):
    assert from_environ(environ).world_size == 1
    assert from_environ(environ).launcher == "none"
    assert slurm.lacks_srun(environ)


@pytest.mark.parametrize(
    "environ", [{}, STEP, BATCH | {"SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "4"}]
)
def test_srun_is_not_missed_elsewhere(environ):
    assert not slurm.lacks_srun(environ)


def test_a_step_of_one_task_in_a_larger_job():
    place = from_environ(STEP | step("node02", "1", 1, 0, SLURM_NTASKS="4"))
    assert (place.world_size, place.rank) == (1, 0)


def test_one_node_needs_no_counts():
    environ = step("localhost", "", 3, 1)
    assert hosts(environ) == ["localhost"] * 3
    assert from_environ(environ).local_rank == 1


def test_nodes_with_other_numbers_of_tasks():
    environ = step("gpu-a[1-2]-x,fat", "2(x2),1", 5, 4)
    assert hosts(environ) == ["gpu-a1-x", "gpu-a1-x", "gpu-a2-x", "gpu-a2-x", "fat"]


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        ("block", "aabbcc"),
        ("block:cyclic", "aabbcc"),
        ("cyclic", "abcabc"),
        ("cyclic:block,NoPack", "abcabc"),
        ("plane", "aabbcc"),
    ],
)
def test_ranks_are_dealt_as_the_step_says(distribution, expected):
    others = {"SLURM_DISTRIBUTION": distribution, "SLURM_DIST_PLANESIZE": "2"}
    assert "".join(hosts(step("a,b,c", "2(x3)", 6, 0, **others))) == expected


def test_uneven_nodes_dealt_in_turn():
    cyclic = step("a,b,c", "3,1,2", 6, 0, SLURM_DISTRIBUTION="cyclic")
    assert "".join(hosts(cyclic)) == "abcaca"
    plane = step("a,b", "5,2", 7, 0, SLURM_DISTRIBUTION="plane", SLURM_DIST_PLANESIZE="2")
    assert "".join(hosts(plane)) == "aabbaaa"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("gpu-a[1-2]-x", ["gpu-a1-x", "gpu-a2-x"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("a[1,3],b,c[2-3].example.org", ["a1", "a3", "b", "c2.example.org", "c3.example.org"]),
        ("n[5]", ["n5"]),
    ],
)
def test_compressed_hosts(text, expected):
    assert slurm.expand_hosts(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "a,,b", "n[1-3", "n1-3]", "n[3-1]", "n[a-b]", "n[]", "n[1--2]", "n[[1]]", "a b"),
        *("n[²]", "n[1-9999999999]", "a" * 60 + "]"),
    ],
)
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(ValueError):
        slurm.expand_hosts(text)


def test_compressed_counts():
    assert slurm.expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert slurm.expand_counts("4") == [4]
    for text in ("", "2(x3", "x3", "2,,1", "0", "-1", "2(x)"):
        with pytest.raises(ValueError):
            slurm.expand_counts(text)


def test_reserved_ports_are_each_nodes():
    environ = step("a,b", "2,1", 3, 2, SLURM_STEP_RESV_PORTS="12400-12401,12500")
    assert from_environ(environ).addresses == ("a:12400", "a:12401", "b:12400")


def test_ports_part_the_steps_of_a_job_and_jobs_that_follow_each_other():
    firsts = {
        from_environ(step("a", "1", 1, 0, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(number)))
        .addresses[0]
        .partition(":")[2]
        for job in range(700, 720)
        for number in range(5)
    }
    assert len(firsts) == 100
    assert all(12000 <= int(port) < 32000 and int(port) % 20 == 0 for port in firsts)


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({}, False),
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_GPU_BIND": "per_task:1"}, True),
        ({"SLURM_GPU_BIND": "none"}, False),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "none"}, False),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "map_gpu:0,1"}, True),
        ({"SLURM_GPUS_ON_NODE": "2"}, False),
    ],
)
def test_gpus_of_a_task(changes, own):
    assert from_environ(STEP | changes).has_own_gpus == own


@pytest.mark.parametrize(
    ("changes", "variable"),
    [
        ({"SLURM_PROCID": "four"}, "SLURM_PROCID"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID"),
        ({"SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS"),
        ({"SLURM_STEP_NODELIST": "node[01-"}, "SLURM_STEP_NODELIST"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID"),
        ({"SLURM_DISTRIBUTION": "cyclic", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, "LOCALID"),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "SLURM_DISTRIBUTION"),
        ({"SLURM_DISTRIBUTION": "plane"}, "SLURM_DIST_PLANESIZE"),
        ({"SLURM_STEP_RESV_PORTS": "12000"}, "SLURM_STEP_RESV_PORTS"),
        ({"SLURM_STEP_RESV_PORTS": "any"}, "SLURM_STEP_RESV_PORTS"),
        ({"SLURM_JOB_ID": "my job"}, "SLURM_JOB_ID"),
        ({"SLURM_STEP_ID": "TBD"}, "SLURM_STEP_ID"),
    ],
)
def test_what_cannot_be_is_named(changes, variable):
    with pytest.raises(OptionError, match=variable):
        from_environ(STEP | changes)


@pytest.mark.parametrize("name", ["SLURM_PROCID"])
def test_what_is_missing_is_named(name):
    environ = {key: value for key, value in STEP.items() if key != name}
    with pytest.raises(OptionError, match=f"no {name}"):
        from_environ(environ)
