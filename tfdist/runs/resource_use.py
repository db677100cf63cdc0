"""What a rank uses while it trains, by epochs: cores, memory, GPUs, energy.

A thread looks at meters. What a meter cannot read is no figure, and never an error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

import psutil

from tfdist.runs.meters import Meter, Reading

_INTERVAL_S = 2.0
# A driver may hang.
_LONGEST_LOOK_S = 5.0
# Of a core; a host with thousands of processes is looked at less often.
_LARGEST_SHARE = 0.004
_MIB = 2**20


class Processes:
    """Cores and memory of this process and all that it has started."""

    def __init__(self) -> None:
        self._own = psutil.Process()

    def read(self) -> Reading:
        cpu, memory = 0.0, 0
        for process in (self._own, *self._own.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # It has ended.
                with process.oneshot():
                    times, held = process.cpu_times(), process.memory_info().rss
                # Of a child that has ended its parent still knows the time.
                cpu += times.user + times.system + times.children_user + times.children_system
                memory += held
        return Reading({"memory_mib": memory / _MIB}, {"cpu_s": cpu})


class ResourceUse:
    """Samples meters in a thread from entering to leaving.

    Args:
        meters: such as ``Processes``.
        interval_s: between samples, at least.
    """

    def __init__(self, meters: Sequence[Meter], interval_s: float = _INTERVAL_S):
        self._meters = meters
        self._interval_s = interval_s
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._hangs = False
        self._thread = threading.Thread(target=self._watch, name="tfdist resources", daemon=True)
        self._levels: dict[str, list[float]] = defaultdict(list)
        self._rates: list[float] = []
        self._begun_at, self._begun = self._read()
        self._last = self._begun_at, self._begun

    def __enter__(self) -> ResourceUse:
        self._thread.start()
        return self

    def __exit__(self, *of_error: object) -> None:
        self._over.set()
        self._thread.join(_LONGEST_LOOK_S)

    def take(self) -> dict[str, float]:
        """Returns the figures since the last call, by the names of ``resources.csv``.

        "cpu_cores" and "gpu" are means, "memory_mib" and "gpu_memory_mib" too, "..._peak..." the
        highest sample, "energy_SOURCE_j" sums in joules. What no meter can read is left out.
        """
        # A driver that hangs has the thread: then nothing is told any more, and nobody waits.
        if self._hangs or not self._lock.acquire(timeout=_LONGEST_LOOK_S):
            self._hangs = True
            return {"seconds": round(time.perf_counter() - self._begun_at, 4)}
        try:
            now, totals = self._last = self._read()
            seconds, begun = now - self._begun_at, self._begun
            levels, rates = self._levels, self._rates
            self._levels, self._rates = defaultdict(list), []
            self._begun_at, self._begun = now, totals
        finally:
            self._lock.release()
        # Less than before: a process has ended and nobody asked how long it had computed.
        used = {name: max(0.0, totals[name] - begun[name]) for name in totals if name in begun}
        found = {"seconds": seconds}
        cpu = used.pop("cpu_s", None)
        if cpu is not None and seconds > 0:
            cores = cpu / seconds
            found |= {"cpu_cores": cores, "cpu_peak_cores": max([cores, *rates])}
        for name, values in levels.items():
            stem, _, unit = name.rpartition("_")
            peak = f"{stem}_peak_{unit}" if stem else f"{name}_peak"
            found |= {name: sum(values) / len(values), peak: max(values)}
        return {name: round(value, 4) for name, value in (found | used).items()}

    def _watch(self) -> None:
        wait = self._interval_s
        while not self._over.wait(wait):
            begun = time.thread_time()
            with self._lock:
                now, totals = self._read()
                at, before = self._last
                self._last = now, totals
                if "cpu_s" in totals and "cpu_s" in before:
                    self._rates.append((totals["cpu_s"] - before["cpu_s"]) / (now - at))
            wait = max(self._interval_s, (time.thread_time() - begun) / _LARGEST_SHARE)

    def _read(self) -> tuple[float, dict[str, float]]:
        """Notes the levels. Returns the time and the totals."""
        totals: dict[str, float] = {}
        for meter in self._meters:
            # Whatever a driver or a file system raises: no training ends for a figure.
            with contextlib.suppress(Exception):
                reading = meter.read()
                totals |= reading.totals
                for name, level in reading.levels.items():
                    self._levels[name].append(level)
        return time.perf_counter(), totals
