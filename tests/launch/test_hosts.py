from __future__ import annotations

import pytest

from tfdist.errors import LaunchError, OptionError
from tfdist.launch import hosts
from tfdist.launch.hosts import Host


def test_hosts_with_and_without_slots():
    assert hosts.parse("a:2, b,10.0.0.1:8") == [Host("a", 2), Host("b", 1), Host("10.0.0.1", 8)]


def test_this_machine_has_a_slot_for_each_core_but_at_least_two(monkeypatch):
    monkeypatch.setattr(hosts, "physical_cores", lambda: 1)
    assert hosts.parse(None) == [Host("localhost", 2)]
    monkeypatch.setattr(hosts, "physical_cores", lambda: 64)
    assert hosts.parse(None) == [Host("localhost", 64)]


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:-1", "a:two", ":2", "a,,b", "a:²", "-x:2"])
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(OptionError, match="host1:2,host2:2"):
        hosts.parse(text)


def test_workers_must_fit():
    places = [Host("a", 2), Host("b", 1)]
    hosts.check_slots(3, places)
    with pytest.raises(LaunchError, match=r"4 workers for 3 slots \(a:2,b:1\)"):
        hosts.check_slots(4, places)


def test_cores_are_counted():
    assert hosts.physical_cores() >= 1
