"""What a private training has given away so far: epsilon for a delta, by ``dp-accounting``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ledger:
    """Accounts for rounds of the Gaussian mechanism on clients drawn independently of each other.

    The unit of privacy is a client with all of its records. Rényi accounting of the Poisson
    subsampled Gaussian mechanism: Mironov et al. 2019, arXiv:1908.10530.

    Attributes:
        noise_multiplier: standard deviation of the noise over the clipping norm.
        sampling_rate: probability that a client is in a round.
        delta: probability that the promise fails; below 1 / clients.
    """

    noise_multiplier: float
    sampling_rate: float
    delta: float

    def epsilon(self, num_rounds: int) -> float:
        """Returns the epsilon of ``num_rounds`` rounds together; infinite without noise."""
        import dp_accounting

        if self.noise_multiplier == 0:
            return math.inf
        event: Any = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        if self.sampling_rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(self.sampling_rate, event)
        accountant = dp_accounting.rdp.RdpAccountant()
        accountant.compose(event, num_rounds)
        return float(accountant.get_epsilon(self.delta))


def default_delta(num_clients: int) -> float:
    """Returns n^-1.1, which is below 1 / n as it must be."""
    return num_clients**-1.1
