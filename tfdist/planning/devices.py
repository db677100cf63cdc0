"""Devices, their links and hosts: read from a table in YAML that users may extend."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, OptionError, unknown_choice
from tfdist.planning.yaml_file import read_yaml

TABLE = Path(__file__).parent / "tables" / "devices.yaml"
#: The device that is a share of the machine that plans.
CPU = "cpu"
_FIELDS = {
    "devices": {"memory_gib", "tflops", "link", "network", "source"},
    "links": {"gigabytes_per_s", "latency_us", "source"},
    "instances": {"device", "devices", "network"},
}
# Of devices; a table may leave them out.
_OPTIONAL = {"watts"}
_SHARES = ("share_of_peak", "usable_memory")
_GIB = 2**30
_BUS = "pcie4"


@dataclass(frozen=True)
class Link:
    """What messages go over.

    Attributes:
        latency_s: seconds of a message of no bytes.
        seconds_per_byte: of a byte in one direction.
        source: where both come from.
    """

    name: str
    latency_s: float
    seconds_per_byte: float
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What computes.

    Attributes:
        memory: bytes.
        flops_per_s: operations a second by kind of model, "float32" and "mixed", as the data sheet
            says.
        source: where these come from.
    """

    name: str
    memory: float
    flops_per_s: Mapping[str, float]
    source: str = ""

    def grown(self, times: float) -> Device:
        """Returns a device of so many times the memory and the operations a second."""
        rates = {kind: rate * times for kind, rate in self.flops_per_s.items()}
        return replace(self, memory=self.memory * times, flops_per_s=rates)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in equal hosts.

    Attributes:
        hosts, per_host: how many hosts, and devices of each.
        link: between the devices of a host.
        network: between hosts, of all devices of one together.
        bus: between a device and its host's memory.
        instance: AWS's name of such a host; None where it has none.
        share_of_peak: what training reaches of ``device.flops_per_s``.
        usable_memory: the share of a device's memory that a step may fill.
    """

    device: Device
    hosts: int
    per_host: int
    link: Link
    network: Link
    bus: Link
    instance: str | None = None
    share_of_peak: float
    usable_memory: float

    @property
    def devices(self) -> int:
        return self.hosts * self.per_host

    @property
    def room(self) -> float:
        """Bytes of a device that a step may fill."""
        return self.device.memory * self.usable_memory

    @property
    def slowest(self) -> Link:
        return self.network if self.hosts > 1 else self.link

    def of(self, devices: int) -> Cluster:
        """Returns as many of these devices: whole hosts where one is not enough.

        One process alone on CPUs has all cores and the memory of its host; two have half of both.
        """
        per_host = min(devices, self.per_host)
        device = self.device
        if device.name == CPU:
            device = device.grown(self.per_host / per_host)
        return replace(self, device=device, hosts=-(-devices // per_host), per_host=per_host)

    def describe(self) -> str:
        """Returns in a few words what it is."""
        if self.hosts == 1:
            return f"{self.per_host} x {self.device.name}"
        return f"{self.hosts} hosts with {self.per_host} x {self.device.name} each"


@dataclass(frozen=True)
class DeviceTable:
    """What ``devices.yaml`` holds, and what a user has added."""

    devices: Mapping[str, Mapping[str, Any]]
    links: Mapping[str, Mapping[str, Any]]
    instances: Mapping[str, Mapping[str, Any]]
    share_of_peak: float
    usable_memory: float

    @classmethod
    def load(cls, added: str | os.PathLike | None = None) -> DeviceTable:
        """Reads tfdist's own table, and one whose rows take the place of its own.

        Raises:
            OptionError: ``added`` cannot be read. DataError: it is no such table.
        """
        own = _read(TABLE)
        more = {} if added is None else _read(Path(added))
        rows = {part: {**own[part], **more.get(part, {})} for part in _FIELDS}
        shares = {name: float(more.get(name, own[name])) for name in _SHARES}
        return cls(**rows, **shares)

    def cluster(self, text: str) -> Cluster:
        """Returns what "h100:8", "a10g:4x2" or "p4d.24xlarge:2" means.

        Args:
            text: NAME, NAME:DEVICES on one host, or NAME:HOSTSxDEVICES; of an instance
                INSTANCE or INSTANCE:HOSTS.

        Raises:
            OptionError: there is no such device, or it cannot be read.
        """
        name, colon, counts = text.partition(":")
        if name not in self.devices and name not in self.instances:
            raise unknown_choice("device", name, [*self.devices, *self.instances])
        found = re.fullmatch(r"(?:([1-9]\d{0,5})x)?([1-9]\d{0,5})", counts if colon else "1")
        if found is None or (name in self.instances and found[1]):
            form = "INSTANCE:HOSTS" if name in self.instances else "NAME:DEVICES"
            raise OptionError(
                f"devices must be written as {form}"
                + ("" if name in self.instances else " or NAME:HOSTSxDEVICES"),
                received=repr(text),
                mend=f"Write for example {name}:2",
            )
        hosts, count = int(found[1] or 1), int(found[2])
        if name in self.instances:
            row = self.instances[name]
            return self._cluster(
                str(row["device"]), count, int(row["devices"]), row.get("network"), name
            )
        return self._cluster(name, hosts, count, None, self._instance_of(name, count))

    def watts_of(self, name: str) -> float | None:
        """Returns the power that is stated for what a driver calls "NVIDIA A100-SXM4-40GB".

        None where there is no such device, or no power is stated.
        """
        return next((self.devices[own].get("watts") for own in self._called(name)), None)

    def of_driver(self, name: str, memory: int, count: int) -> Cluster:
        """Returns ``count`` devices of one host, of what a driver calls ``name``.

        Args:
            memory: bytes of a device, as the driver says.

        Raises:
            OptionError: the table has no such device.
        """
        called = self._called(name)
        if not called:
            raise OptionError(
                "the table of devices must have the GPUs of this machine",
                received=repr(name),
                mend="Plan with `tfdist plan --device-file`, and name the strategy",
            )
        # An "a100-80" is an A100 with more memory.
        nearest = min(called, key=lambda own: abs(self.devices[own]["memory_gib"] * _GIB - memory))
        found = self.cluster(f"{nearest}:{count}")
        return replace(found, device=replace(found.device, memory=memory, source="its driver"))

    def _called(self, name: str) -> list[str]:
        """Returns this table's names of what a driver calls ``name``."""
        words = re.sub(r"[^a-z0-9]+", " ", name.lower()).replace("rtx ", "rtx").split()
        return [own for own in self.devices if own.partition("-")[0] in words]

    def _instance_of(self, device: str, count: int) -> str | None:
        """Returns the first instance that holds just so many of a device."""
        held = (device, count)
        rows = self.instances.items()
        return next((name for name, row in rows if (row["device"], row["devices"]) == held), None)

    def _cluster(
        self, name: str, hosts: int, per_host: int, network: str | None, instance: str | None
    ) -> Cluster:
        if name not in self.devices:
            raise unknown_choice("device of an instance", name, list(self.devices))
        row = self.devices[name]
        device = Device(
            name=name,
            memory=float(row["memory_gib"]) * _GIB,
            flops_per_s={kind: float(rate) * 1e12 for kind, rate in row["tflops"].items()},
            source=str(row["source"]),
        )
        return Cluster(
            device=_share_of_this_machine(device, per_host) if name == CPU else device,
            hosts=hosts,
            per_host=per_host,
            link=self._link(row["link"]),
            network=self._link(network or row["network"]),
            bus=self._link(_BUS),
            instance=instance,
            share_of_peak=self.share_of_peak,
            usable_memory=self.usable_memory,
        )

    def _link(self, name: str) -> Link:
        if name not in self.links:
            raise unknown_choice("link", name, list(self.links))
        row = self.links[name]
        speed = float(row["gigabytes_per_s"]) * 1e9
        return Link(name, float(row["latency_us"]) / 1e6, 1 / speed, str(row["source"]))


def _share_of_this_machine(core: Device, per_host: int) -> Device:
    import psutil

    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total
    own = replace(core.grown(cores / per_host), memory=memory / per_host)
    return replace(own, source=f"{core.source}; {cores} cores and {memory / 2**30:.3g} GiB here")


def _read(path: Path) -> dict[str, Any]:
    """Returns a table. Raises DataError: not of this form."""
    value = read_yaml(path)

    def refuse(where: str, received: object, rule: str) -> None:
        raise DataError(
            f"{where} of {path} must {rule}",
            received=received,
            mend=f"Correct it; {TABLE} shows the form",
        )

    if not isinstance(value, dict):
        refuse("the whole", type(value).__name__, "be a mapping")
    known = {*_FIELDS, *_SHARES, "date"}
    for part in value:
        if part not in known:
            refuse("each part", repr(part), f"be one of {', '.join(sorted(known))}")
    for share in _SHARES:
        if share in value and not _is_number(value[share], most=1):
            refuse(share, repr(value[share]), "be a number above 0 and at most 1")
    for part, fields in _FIELDS.items():
        rows = value.get(part, {})
        if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
            refuse(part, repr(rows)[:80], "map names to rows")
        for name, row in rows.items():
            if not isinstance(name, str):
                refuse(part, f"the name {name!r}", "map names, which are text, to rows")
            optional = _OPTIONAL if part == "devices" else set()
            if set(row) - optional != fields:
                known_fields = ", ".join(sorted(fields))
                received = ", ".join(map(str, row)) or "none"
                refuse(f"{part}.{name}", received, f"have the fields {known_fields}")
            _check_numbers(f"{part}.{name}", row, refuse)
    return value


def _check_numbers(where: str, row: Mapping[str, Any], refuse: Any) -> None:
    for field in ("memory_gib", "gigabytes_per_s", "latency_us", "devices", "watts"):
        if field in row and not _is_number(row[field]):
            refuse(f"{where}.{field}", repr(row[field]), "be a number above 0")
    if not isinstance(row.get("devices", 1), int):
        refuse(f"{where}.devices", repr(row["devices"]), "be a whole number")
    for field in ("link", "network", "device"):
        if not isinstance(row.get(field, ""), str):
            refuse(f"{where}.{field}", repr(row[field]), "be text")
    rates = row.get("tflops", {})
    if "tflops" in row and (
        not isinstance(rates, dict)
        or set(rates) != {"float32", "mixed"}
        or not all(map(_is_number, rates.values()))
    ):
        refuse(f"{where}.tflops", repr(rates), "have numbers above 0 as float32 and mixed")


def _is_number(value: Any, most: float = 1e15) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= most
