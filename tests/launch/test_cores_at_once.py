"""What cores do at once, of what each does alone."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.launch import cores_at_once, hosts


@pytest.mark.parametrize("cores", [2, 6])
def test_a_core_is_compared_with_itself_alone(monkeypatch, cores):
    asked: dict[int, list[float]] = {}

    def count(cpu, starts):
        asked[cpu] = starts
        while len(asked) < cores:
            pass
        at_work = Counter(start for of_core in asked.values() for start in of_core)
        assert set(at_work.values()) == {1, cores}  # A core alone, or all of them.
        return [8 if at_work[start] == cores else 10 for start in starts]

    monkeypatch.setattr(cores_at_once, "ProcessPoolExecutor", lambda n, _: ThreadPoolExecutor(n))
    monkeypatch.setattr(cores_at_once, "_count", count)
    assert cores_at_once._at_once(range(cores)) == pytest.approx(0.8)


@pytest.mark.skipif(len(hosts.cores_here()) < 2, reason="needs two cores")
def test_processes_on_cores_of_their_own(monkeypatch):
    # So long that a process which others hold up still comes to its later slots.
    monkeypatch.setattr(cores_at_once, "_ROUNDS", 8)
    assert 0 < cores_at_once._at_once([core[0] for core in hosts.cores_here()[:2]]) < 5
