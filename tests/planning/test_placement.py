"""Which training runs where."""

from __future__ import annotations

import pytest

from tfdist.errors import DataError, OptionError
from tfdist.planning.devices import DeviceTable
from tfdist.planning.placement import Job, Slot, place, read_jobs, when_ended

TABLE = DeviceTable.load()
GB = 1e9  # A v100 has 15.5 of them.


def pool(**hosts: str):
    return {name: TABLE.cluster(text) for name, text in hosts.items()}


def test_each_on_as_few_hosts_as_possible():
    jobs = [Job("one", 1, GB), Job("three", 3, GB), Job("four", 4, GB)]
    placed = place(jobs, pool(a="v100:4", b="v100:4"))
    assert placed.hosts_of("four") == {"a": 4}
    assert placed.hosts_of("three") == {"b": 3}
    assert placed.hosts_of("one") == {"b": 1}
    assert placed.waiting == ()
    assert placed.shared_with("one") == []


def test_the_host_that_has_fewest_too_many():
    placed = place([Job("two", 2, GB)], pool(a="v100:4", b="v100:2"))
    assert placed.hosts_of("two") == {"b": 2}


def test_a_job_larger_than_a_host_takes_the_largest_first():
    placed = place([Job("six", 6, GB)], pool(a="v100:2", b="v100:4", c="v100:2"))
    assert placed.hosts_of("six") == {"b": 4, "a": 2}


def test_devices_of_a_job_are_of_one_kind():
    hosts = pool(a="v100:2", b="t4:2")
    placed = place([Job("three", 3, GB)], hosts)
    assert placed.waiting == ("three",)


@pytest.mark.parametrize(
    ("second", "shares"),
    [
        (Job("b", 2, 5 * GB, busy=0.6), True),
        (Job("b", 2, 5 * GB, busy=0.7), False),
        (Job("b", 2, 9 * GB, busy=0.1), False),
        (Job("b", 2, 5 * GB), False),
    ],
)
def test_a_device_is_shared_where_neither_slows(second, shares):
    jobs = [Job("a", 2, 8 * GB, busy=0.4), second]
    placed = place(jobs, pool(host="v100:2"))
    if shares:
        assert placed.slots["a"] == placed.slots["b"] == (Slot("host", 0), Slot("host", 1))
        assert placed.shared_with("a") == ["b"]
    else:
        assert placed.waiting == ("b",)


def test_free_devices_come_before_shared_ones():
    jobs = [Job(name, 1, GB, busy=0.1) for name in "abc"]
    placed = place(jobs, pool(host="v100:2"))
    assert placed.slots["a"] != placed.slots["b"]
    assert placed.shared_with("c") == ["a"]


def test_who_waits_begins_first():
    jobs = [Job("a", 4, GB), Job("b", 2, GB)]
    hosts = pool(host="v100:4")
    placed = place(jobs, hosts)
    assert placed.waiting == ("b",)
    ending = when_ended("a", placed, jobs, hosts)
    assert ending.starts == {"b": {"host": 2}}
    assert ending.moves == {}


def test_who_spans_hosts_moves():
    jobs = [Job("a", 3, GB), Job("b", 3, GB), Job("c", 2, GB)]
    hosts = pool(x="v100:4", y="v100:4")
    placed = place(jobs, hosts)
    assert placed.hosts_of("c") == {"x": 1, "y": 1}
    ending = when_ended("a", placed, jobs, hosts)
    assert ending.moves == {"c": {"x": 2}}
    assert when_ended("c", placed, jobs, hosts).moves == {}


def test_a_file(tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "hosts: {a: 'v100:4'}\njobs: {one: {devices: 2, memory_gib: 5, busy: 0.4}, "
        "two: {devices: 1, memory_gib: 3}}"
    )
    jobs, hosts = read_jobs(path, TABLE)
    assert jobs == [Job("one", 2, 5 * 2**30, 0.4), Job("two", 1, 3 * 2**30, 1.0)]
    assert hosts["a"].per_host == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "the whole of .* must have hosts and jobs"),
        ("hosts: {}\njobs: {a: {devices: 1, memory_gib: 1}}", "hosts of .* must map names"),
        ("hosts: {a: 'v100:2x4'}\njobs: {a: {devices: 1, memory_gib: 1}}", "be one host"),
        ("hosts: {1: t4, '1': t4}\njobs: {a: {devices: 1, memory_gib: 1}}", "each name once"),
        ("hosts: {a: t4}\njobs: {a: {devices: 1}}", "have devices and memory_gib"),
        ("hosts: {a: t4}\njobs: {a: {devices: 1, memory_gib: 1, idle: 1}}", "may have busy"),
        ("hosts: {a: t4}\njobs: {a: {devices: 0, memory_gib: 1}}", "whole number of at least 1"),
        ("hosts: {a: t4}\njobs: {a: {devices: 1, memory_gib: 1, busy: 2}}", "at most 1"),
        ("hosts: {a: t4}\njobs: {a: {devices: 1, memory_gib: .nan}}", "memory_gib .* above 0"),
    ],
)
def test_a_file_of_another_form(tmp_path, text, message):
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_jobs(path, TABLE)


def test_a_host_of_unknown_devices(tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text("hosts: {a: v10}\njobs: {a: {devices: 1, memory_gib: 1}}")
    with pytest.raises(OptionError, match="Did you mean 'v100'"):
        read_jobs(path, TABLE)
