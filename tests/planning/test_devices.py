"""What devices mean, and the file that they stand in."""

from __future__ import annotations

import os

import psutil
import pytest
import yaml

from tfdist.errors import DataError, OptionError
from tfdist.planning.devices import TABLE, DeviceTable


@pytest.fixture(scope="module")
def table():
    return DeviceTable.load()


@pytest.mark.parametrize(
    ("text", "hosts", "per_host", "device"),
    [
        ("h100", 1, 1, "h100"),
        ("h100:8", 1, 8, "h100"),
        ("a10g:4x2", 4, 2, "a10g"),
        ("p4d.24xlarge", 1, 8, "a100"),
        ("p4d.24xlarge:3", 3, 8, "a100"),
    ],
)
def test_what_is_written(table, text, hosts, per_host, device):
    cluster = table.cluster(text)
    assert (cluster.hosts, cluster.per_host, cluster.device.name) == (hosts, per_host, device)
    assert cluster.devices == hosts * per_host


def test_numbers_and_their_units(table):
    cluster = table.cluster("g5.12xlarge:2")
    assert cluster.device.memory == 22.5 * 2**30
    assert cluster.device.flops_per_s == {"float32": 35e12, "mixed": 70e12}
    assert cluster.network.seconds_per_byte == pytest.approx(1 / 5e9)
    assert cluster.link.latency_s == pytest.approx(5.7e-6)
    assert cluster.room == pytest.approx(0.9 * 22.5 * 2**30)


def test_the_instance_of_as_many_devices(table):
    assert table.cluster("a10g:2x4").instance == "g5.12xlarge"
    assert table.cluster("h100:3").instance is None


def test_shares_of_this_machine(table):
    halves, cores = table.cluster("cpu:2"), len(os.sched_getaffinity(0))
    assert halves.device.memory == psutil.virtual_memory().total / 2
    assert halves.device.flops_per_s["float32"] == pytest.approx(0.08e12 * cores / 2)
    whole = halves.of(1)
    assert whole.device.memory == psutil.virtual_memory().total
    assert whole.device.flops_per_s["float32"] == pytest.approx(0.08e12 * cores)


def test_more_devices_are_more_hosts(table):
    cluster = table.cluster("a10g:4")
    assert [(c.hosts, c.per_host) for c in map(cluster.of, (1, 3, 4, 8, 9))] == [
        (1, 1),
        (1, 3),
        (1, 4),
        (2, 4),
        (3, 4),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10:8", "Did you mean 'h100'"),
        ("h100:", "NAME:DEVICES or NAME:HOSTSxDEVICES"),
        ("h100:0", "NAME:DEVICES"),
        ("h100:2x", "NAME:DEVICES"),
        ("p4d.24xlarge:2x4", "INSTANCE:HOSTS"),
    ],
)
def test_devices_that_cannot_be_read(table, text, message):
    with pytest.raises(OptionError, match=message):
        table.cluster(text)


def test_a_file_of_ones_own(tmp_path):
    mine = {
        "usable_memory": 0.5,
        "devices": {
            "mine": {
                "memory_gib": 10,
                "tflops": {"float32": 1, "mixed": 2},
                "link": "wire",
                "network": "ethernet10",
                "source": "me",
            }
        },
        "links": {"wire": {"gigabytes_per_s": 2, "latency_us": 1, "source": "me"}},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    cluster = DeviceTable.load(tmp_path / "mine.yaml").cluster("mine:2")
    assert cluster.link.seconds_per_byte == pytest.approx(0.5e-9)
    assert cluster.network.name == "ethernet10"
    assert cluster.room == 5 * 2**30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a mapping"),
        ("gpus: {}", "must be one of date, devices"),
        ("devices: [a]", "map names to rows"),
        ("links: {a: {gigabytes_per_s: 1, speed: 2}}", "links.a of .* have the fields"),
        ("links: {a: {gigabytes_per_s: -1, latency_us: 1, source: x}}", "above 0, but found -1"),
        ("links: {a: {gigabytes_per_s: fast, latency_us: 1, source: x}}", "but found 'fast'"),
        (
            "devices: {a: {memory_gib: 1, tflops: 3, link: b, network: b, source: x}}",
            "float32 and mixed",
        ),
        ("devices: {4090: {}}", "names, which are text, to rows, but found the name 4090"),
        (
            "devices: {a: {memory_gib: 1, tflops: {float32: 1, mixed: 1}, link: 1, network: b, "
            "source: x}}",
            "devices.a.link of .* must be text, but found 1",
        ),
        ("instances: {a: {device: t4, devices: 2.5, network: b}}", "a whole number, but found 2.5"),
        ("share_of_peak: 2", "at most 1"),
        ("a: [", "must be YAML"),
        (
            "date: 2026-02-30",
            "must be YAML, but found an error: .* day is out",
        ),
        ("date: !!bool perhaps", "must be YAML, but found an error: a value that cannot be"),
        ("date: !!timestamp soon", "must be YAML, but found an error: a value that cannot be"),
    ],
)
def test_a_file_that_is_no_table(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(DataError, match=message):
        DeviceTable.load(tmp_path / "mine.yaml")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OptionError, match="must be readable"):
        DeviceTable.load(tmp_path / "none.yaml")


def test_a_link_that_no_row_has(tmp_path):
    row = yaml.safe_load(TABLE.read_text())["devices"]["t4"] | {"link": "pcie9"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"devices": {"mine": row}}))
    with pytest.raises(OptionError, match="Did you mean 'pcie"):
        DeviceTable.load(tmp_path / "mine.yaml").cluster("mine")


def test_every_row_can_be_planned_with_and_says_its_source(table):
    for name in (*table.devices, *table.instances):
        cluster = table.cluster(name)
        assert cluster.device.source
        assert cluster.link.source
        assert cluster.network.source


def test_a_gpu_is_known_by_its_drivers_name():
    table = DeviceTable.load()
    for name, watts in (
        ("NVIDIA A100-SXM4-80GB", 400),
        ("Tesla V100-SXM2-16GB", 300),
        ("NVIDIA GeForce RTX 4090", 450),
        ("NVIDIA L40S", 350),
        ("NVIDIA GB300", None),
        ("", None),
    ):
        assert table.watts_of(name) == watts, name
