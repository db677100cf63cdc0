"""Training with tfdist against scripts written by hand: steps per second, ratios of pairs.

Whole programs are compared in turn, each in processes of its own. The overhead of a step, where a
hundredth counts, is measured by fits in turn within one job.
"""

from __future__ import annotations

from benchmarks.pairs import FULL, QUICK, WORKERS, alone, command, environ, paired, whole_programs
from tfdist.launch import mpi, programs
from tfdist.launch.supervisor import Job


def run(quick: bool = False) -> list[dict]:
    """Returns one row for each kind of work: work, baseline and ours (steps/s), ratio, target.

    ``ratios`` holds those of the pairs that count: pairs during which other programs took more
    than a twenty-fifth of the cores are measured anew, twice at most, and dropped as long as any
    other is left. ``others`` is the largest share that they took in a pair that counts.
    """
    size = QUICK if quick else FULL
    fit = (size.steps, size.epochs)
    pair = (size.steps, size.pairs)
    # A step of two ranks is the work of two steps: efficiency is the ratio of the steps.
    against = {
        "horovod fit, 2 ranks, naive script": (_as_documented("naive_horovod", *fit), 1.45),
        "horovod fit, 2 ranks, efficiency": (alone("tfdist_fit", "horovod", *fit, 0), 0.88),
    }
    return [
        *whole_programs(against, _on_ranks("tfdist_fit", "horovod", *fit), size, quick),
        paired("horovod step, 2 ranks", _on_ranks("pair_horovod", *pair), size, quick),
        paired("mirrored step, 2 CPUs", alone("pair_mirrored", *pair), size, quick),
        paired("single step", alone("pair_single", *pair), size, quick),
    ]


def _on_ranks(program: str, *arguments: int | str) -> Job:
    return mpi.job(command(program, *arguments), workers=WORKERS, environ=environ())


def _as_documented(program: str, *arguments: int | str) -> Job:
    """The command line of Horovod's page on mpirun; rank 0 alone speaks."""
    env = programs.rank_environment(environ())
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = programs.find("mpirun", "the benchmark", env)
    options = ["-np", str(WORKERS), "--bind-to", "none", "--map-by", "slot"]
    return Job(command=[mpirun, *options, *command(program, *arguments)], env=env, world_size=1)
