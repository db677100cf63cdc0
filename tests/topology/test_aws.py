"""The place of a SageMaker container, from what the service and its toolkit write."""

from __future__ import annotations

import json

import pytest

from tfdist import topology
from tfdist.errors import OptionError
from tfdist.topology import aws, from_environ

# Of the toolkit 5.1.4 on the second of two ml.g5.2xlarge; what concerns no place is left out.
TWO_HOSTS = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "1",
    "SM_NUM_CPUS": "8",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_RESOURCE_CONFIG": '{"current_host":"algo-2","hosts":["algo-1","algo-2"],'
    '"network_interface_name":"eth0"}',
    "TRAINING_JOB_NAME": "digits-2026-11-21",
}
# /opt/ml/input/config/resourceconfig.json
RESOURCE_CONFIG = """{
    "current_group_name": "homogeneousCluster",
    "current_host": "algo-1",
    "current_instance_type": "ml.g5.2xlarge",
    "hosts": ["algo-2", "algo-1", "algo-3"],
    "instance_groups": [{"hosts": ["algo-1", "algo-2", "algo-3"],
                         "instance_group_name": "homogeneousCluster",
                         "instance_type": "ml.g5.2xlarge"}],
    "network_interface_name": "eth0"
}"""


def test_a_process_for_each_host():
    place = from_environ(TWO_HOSTS)
    assert (place.launcher, place.role) == ("sagemaker", "worker")
    assert (place.world_size, place.rank) == (2, 1)
    assert (place.local_rank, place.local_size) == (0, 1)
    assert place.addresses == ("algo-1:12000", "algo-2:12001")


def test_the_content_of_the_resource_config_is_enough():
    place = from_environ({"SM_RESOURCE_CONFIG": RESOURCE_CONFIG})
    assert (place.world_size, place.rank) == (3, 0)
    assert [a.partition(":")[0] for a in place.addresses] == ["algo-1", "algo-2", "algo-3"]


def test_a_container_without_the_toolkit_has_the_file(monkeypatch, tmp_path):
    file = tmp_path / "resourceconfig.json"
    file.write_text(RESOURCE_CONFIG)
    monkeypatch.setattr(aws, "RESOURCE_CONFIG_FILE", file)
    monkeypatch.setattr("os.environ", {})
    assert topology.current().world_size == 3
    monkeypatch.setattr("os.environ", TWO_HOSTS)
    assert topology.current().world_size == 2


def test_each_host_of_each_instance_group_is_a_rank():
    """A heterogeneous cluster runs the program on all of them."""
    names = {"gpu": ["algo-1", "algo-3"], "cpu": ["algo-2"]}
    groups = [
        {"instance_group_name": name, "instance_type": f"ml.{name}", "hosts": hosts}
        for name, hosts in names.items()
    ]
    config = json.loads(RESOURCE_CONFIG) | {"instance_groups": groups}
    found = {
        (host, place.rank, place.world_size)
        for name, hosts in names.items()
        for host in hosts
        for current in [config | {"current_host": host, "current_group_name": name}]
        for place in [from_environ({"SM_RESOURCE_CONFIG": json.dumps(current)})]
    }
    assert found == {("algo-1", 0, 3), ("algo-2", 1, 3), ("algo-3", 2, 3)}


def test_one_host_is_one_process():
    assert from_environ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}).world_size == 1
    assert from_environ({"SM_HOSTS": '["algo-1"]'}).is_chief


def test_hosts_of_eleven_are_ranked_alike_everywhere():
    names = [f"algo-{number}" for number in range(1, 12)]
    ranks = {
        name: from_environ({"SM_HOSTS": json.dumps(names), "SM_CURRENT_HOST": name}).rank
        for name in names
    }
    assert sorted(ranks.values()) == list(range(11))
    assert ranks["algo-1"] == 0


@pytest.mark.parametrize(
    ("changes", "variable"),
    [
        ({"SM_HOSTS": "algo-1,algo-2"}, "SM_HOSTS must hold JSON"),
        ({"SM_HOSTS": "[]"}, "SM_HOSTS"),
        ({"SM_HOSTS": "[1, 2]"}, "SM_HOSTS"),
        ({"SM_HOSTS": '{"algo-1": 0}'}, "SM_HOSTS"),
        ({"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST"),
        ({"SM_HOSTS": "", "SM_RESOURCE_CONFIG": "{"}, "SM_RESOURCE_CONFIG must hold JSON"),
        ({"SM_HOSTS": "", "SM_RESOURCE_CONFIG": "[]"}, "SM_RESOURCE_CONFIG"),
        ({"SM_HOSTS": "", "SM_RESOURCE_CONFIG": '{"hosts": ["a", "b"]}'}, "SM_RESOURCE_CONFIG"),
    ],
)
def test_what_cannot_be_is_named(changes, variable):
    with pytest.raises(OptionError, match=variable):
        from_environ(TWO_HOSTS | changes)


def test_several_hosts_must_know_which_they_are():
    with pytest.raises(OptionError, match="no SM_CURRENT_HOST"):
        from_environ({"SM_HOSTS": '["algo-1","algo-2"]'})
