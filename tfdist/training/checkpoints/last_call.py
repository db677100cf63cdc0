"""SIGTERM during a fit that keeps checkpoints: it writes one more, and the process ends.

Kubernetes, Slurm and spot machines give notice so, half a minute to two minutes before they kill.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from tfdist.training.engine.collective import Collective
from tfdist.training.engine.elastic_collective import ElasticCollective

# How often processes ask each other: they must stop after the same step.
_INTERVAL_S = 2.0
_MOST_STEPS = 500  # Between two questions, should steps become slower.
# Whoever signals all processes of a job has a launcher pass it on once more.
_SAME_NOTICE_S = 1.0


class _Notice:
    is_given = False
    #: What comes until then is the same one.
    same_until = math.inf


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Encloses a fit: the first SIGTERM is a notice, unless the user has a handler of his own.

    The next one ends the process, as does the end of the fit where nothing heeded the notice.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def take_notice(number: int, _frame: object) -> None:
        if not _Notice.is_given:
            _Notice.is_given, _Notice.same_until = True, math.inf
            # Python hears of none within a step of TensorFlow: the same notice would be late there.
            time.sleep(_SAME_NOTICE_S)
            _Notice.same_until = time.monotonic() + _SAME_NOTICE_S
        elif time.monotonic() > _Notice.same_until:
            _end()

    signal.signal(signal.SIGTERM, take_notice)
    try:
        yield
    finally:
        is_given, _Notice.is_given = _Notice.is_given, False
        if signal.getsignal(signal.SIGTERM) is take_notice:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if is_given:
        os.kill(os.getpid(), signal.SIGTERM)


def _end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


class LastCall:
    """Whether it is time to write and leave; all processes of a fit ask after the same steps.

    Several processes ask each other about every two seconds, so that no step waits for it. An
    elastic one that is told to end does so at once: the others go on without it.
    """

    def __init__(self, collective: Collective):
        self._collective = collective
        self._asked_at = time.monotonic()
        self._steps = 0  # Since they have asked each other.
        self._wait = 1

    def after_step(self) -> bool:
        self._steps += 1
        return self._steps >= self._wait and self.after_epoch()

    def after_epoch(self) -> bool:
        is_given = _Notice.is_given
        if isinstance(self._collective, ElasticCollective):
            if is_given:
                _end()
            return False
        if self._collective.num_processes == 1:
            return is_given
        now = time.monotonic()
        told = self._collective.gather((is_given, now - self._asked_at))
        if self._steps:  # The first ones may have traced: the pace is felt for.
            due = self._steps * _INTERVAL_S / max(told[0][1], 1e-3)
            self._wait = max(1, min(int(due), 2 * self._wait, _MOST_STEPS))
        self._asked_at, self._steps = now, 0
        return any(is_given for is_given, _ in told)

    def leave(self, newest: str) -> NoReturn:
        """Ends the process, as SIGTERM would have."""
        if self._collective.is_chief:
            print(f"tfdist: the last checkpoint before SIGTERM ends this: {newest}", flush=True)
        sys.exit(128 + signal.SIGTERM)
