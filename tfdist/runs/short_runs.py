"""Two short trainings, on one process and on two, in place of defaults of a plan."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from tfdist.errors import OptionError, spelt
from tfdist.launch.jobs import Where
from tfdist.planning import messages
from tfdist.planning.devices import CPU, Cluster
from tfdist.planning.needs import Needs
from tfdist.planning.plan import Speed
from tfdist.planning.step_time import fit_overlap
from tfdist.runs.progress import Silent
from tfdist.runs.settings import Settings, Start
from tfdist.runs.training import carry_out, training_config
from tfdist.topology.gpus import visible_gpus

# The first epoch traces; of the others the median counts.
_EPOCHS, _STEPS = 4, 12


def check_is_here(cluster: Cluster, option: str, least: int) -> None:
    """Raises OptionError: the devices are not those of this machine, on which ``option`` runs.

    Args:
        least: devices that it runs on.
    """
    here = least if cluster.device.name == CPU else len(visible_gpus())
    if cluster.hosts > 1 or here < least:
        raise OptionError(
            f"{spelt(option)} must run on a machine with the devices that are planned for",
            received=cluster.describe()
            + ("" if here >= least else f", and {here or 'no'} GPU here, of {least} that it takes"),
            mend="Leave it out, or plan for the devices that are here",
        )


def measure(
    model: str, train: str, needs: Needs, cluster: Cluster, rows: int, several: str
) -> tuple[Speed, str]:
    """Returns how fast a device computes and what it does at the same time, and how that was found.

    On GPUs a process has one, and half of a global batch where there are two. On CPUs one process
    has all cores, of which two have half each: both take whole global batches. One process alone
    takes a quarter of its rows as well: what a row adds is computing, the rest of a step is fixed.

    Args:
        train: the split that is trained on, see ``find_splits``.
        needs: of a step on one device.
        cluster: devices of the kind that is here.
        rows: of a global batch.
        several: the strategy of two processes.
    """
    is_cpu = cluster.device.name == CPU
    of_one = rows if is_cpu else max(1, rows // 2)
    of_two = rows if is_cpu else 2 * of_one
    few = max(1, of_one // 4)
    one = Where(strategy="single", options={}, workers=1)
    alone, least = (_step_seconds(model, train, count, one) for count in (of_one, few))
    together = _step_seconds(model, train, of_two, Where(strategy=several, options={}, workers=2))
    peak = Speed(share_of_peak=1.0).of(cluster.of(1), needs.half)
    fixed = fixed_seconds({few: least, of_one: alone})
    share = (needs.flops + needs.flops_per_row * of_one) / (alone - fixed) / peak
    sending = messages.ring(needs.gradients, 2, cluster.link)
    told = (
        f"{few:,} and {of_one:,} rows on one process in {least * 1e3:.3g} and "
        f"{alone * 1e3:.3g} ms, {of_two:,} on two of {several} in {together * 1e3:.3g} ms"
    )
    return Speed(share, fit_overlap(alone, together, sending), fixed), told


def fixed_seconds(measured: Mapping[int, float]) -> float:
    """Returns the seconds of a step that its rows do not change, at least 0.

    Args:
        measured: rows -> seconds of a step, of few rows and of many. Where these take no longer,
            as noise can have it, nothing tells the two apart, and all of it counts as computing.
    """
    few, many = sorted(measured)[0], sorted(measured)[-1]
    of_row = (measured[many] - measured[few]) / max(1, many - few)
    return max(0.0, measured[few] - of_row * few) if of_row > 0 else 0.0


def _step_seconds(model: str, train: str, rows: int, where: Where) -> float:
    with tempfile.TemporaryDirectory(prefix="tfdist-plan-") as folder:
        config = training_config(
            where,
            model=model,
            data=train,
            output=Path(folder, "run"),
            settings=Settings(epochs=_EPOCHS, global_batch_size=rows, limit_steps=_STEPS),
        )
        run = carry_out(config, where, Silent(_EPOCHS), Start(), tell=lambda text: None)
    assert run is not None, "a plan is made by one process"
    return rows / run.summary["samples_per_s"] * (1 - (run.summary["data_wait"] or 0.0))
