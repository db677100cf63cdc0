"""resources.csv through restarts and resumes, and what is said of it."""

from __future__ import annotations

import pytest

from tfdist.errors import DataError
from tfdist.runs.files import read_rows
from tfdist.runs.folder import RunFolder
from tfdist.runs.resource_log import ResourceLog, told


def _event(epoch: int, rank: int, **figures: float) -> dict:
    return {"event": "resources", "epoch": epoch, "rank": rank, "seconds": 2.0, **figures}


def _written(folder: RunFolder) -> list[tuple]:
    return [(row["epoch"], row["rank"], row["cpu_cores"]) for row in read_rows(folder.resources)]


def test_rows_are_by_epoch_and_rank_and_stand_with_each_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    log = ResourceLog(folder)
    for epoch, rank in ((1, 1), (1, 0), (2, 0)):
        log.take(_event(epoch, rank, cpu_cores=1.0))
        assert not folder.resources.exists()
    log.take({"event": "checkpoint", "path": "c"})
    assert _written(folder) == [(1, 0, 1), (1, 1, 1), (2, 0, 1)]


def test_epochs_that_are_trained_again_are_told_anew(tmp_path):
    """After a restart with fewer ranks, and in a resumed training."""
    folder = RunFolder(tmp_path)
    log = ResourceLog(folder)
    for epoch in (1, 2):
        for rank in (0, 1):
            log.take(_event(epoch, rank, cpu_cores=1.0))
    log.take({"event": "restart", "number": 1, "reason": "a rank was lost"})
    log.take(_event(2, 0, cpu_cores=2.0))
    log.write()
    assert _written(folder) == [(1, 0, 1), (1, 1, 1), (2, 0, 2)]
    resumed = ResourceLog(folder)
    resumed.take(_event(2, 1, cpu_cores=3.0))
    resumed.take(_event(2, 0, cpu_cores=3.0))
    resumed.write()
    assert _written(folder) == [(1, 0, 1), (1, 1, 1), (2, 0, 3), (2, 1, 3)]


def test_the_summary_has_means_peaks_and_sums(tmp_path):
    log = ResourceLog(RunFolder(tmp_path))
    log.take(_event(1, 0, cpu_cores=1.0, memory_peak_mib=900.0, energy_rapl_j=10.0))
    log.take(_event(1, 1, cpu_cores=1.5, memory_peak_mib=500.0))
    log.take(_event(2, 0, cpu_cores=2.0, memory_peak_mib=800.0, energy_rapl_j=5.0))
    first, second = log.summary()
    assert first == {
        "rank": 0,
        "seconds": 4,
        "cpu_cores": 1.5,
        "memory_peak_mib": 900,
        "energy_rapl_j": 15,
        "energy_sources": ["rapl"],
    }
    assert second == {"rank": 1, "seconds": 2, "cpu_cores": 1.5, "memory_peak_mib": 500}
    line = "each of 2 processes: 1.50 cores, 500 to 900 MiB at most, 15 J (rapl)"
    assert told({"resources": [first, second]}) == line
    assert told({"resources": []}) is None


def test_a_damaged_file_is_refused(tmp_path):
    folder = RunFolder(tmp_path)
    folder.resources.write_text("epoch,rank\n1,0\n")
    with pytest.raises(DataError, match="must be as tfdist train wrote it"):
        ResourceLog(folder)
    folder.resources.unlink()
    ResourceLog(folder).write()  # Of no epoch no file.
    assert not folder.resources.exists()
