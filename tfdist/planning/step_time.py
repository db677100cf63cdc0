"""How long a step takes: what it computes, what it sends, and how much of both at the same time."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Of forward and backward, which computes twice as much: gradients of weights and of activations.
_FORWARD = 1 / 3
#: Bytes of gradients that Horovod sends at a time since 0.21 (HOROVOD_FUSION_THRESHOLD).
HOROVOD_BUCKET = 128 * 2**20
# A fitted exponent above says that all messages are hidden, and no more.
_MOST = 64.0


@dataclass(frozen=True)
class Overlap:
    """How computing and messages share the time of a step.

    Attributes:
        exponent: g of (Tc^g + Tm^g)^(1/g), fitted to two measured steps: 1 is one after the other,
            a large one all at once. None: not measured; then what is known of the engine counts,
            that messages are sent in buckets while the way back computes.
        slower: what messages were measured to take, over what the link's numbers say; at least 1.
    """

    exponent: float | None = None
    slower: float = 1.0

    def describe(self) -> str:
        """Returns what was fitted, in the words of a plan's sources."""
        told = f"g = {self.exponent:.3g} of T = (Tc^g + Tm^g)^(1/g)"
        slower = f", messages {self.slower:.3g} times what the link says"
        return told + slower * (self.slower > 1)

    def step_seconds(self, compute: float, messages: float, buckets: int = 1) -> float:
        """Returns the seconds of a step.

        Args:
            compute, messages: seconds of each alone.
            buckets: messages that follow each other while the way back computes; 1: all gradients
                in one, which waits for the last of them.
        """
        messages *= self.slower
        if self.exponent is None:
            return _in_buckets(compute, messages, buckets)
        most = max(compute, messages)
        if most == 0:
            return 0.0
        shares = (compute / most) ** self.exponent + (messages / most) ** self.exponent
        return most * shares ** (1 / self.exponent)


def _in_buckets(compute: float, messages: float, buckets: int) -> float:
    """The way back is done in as many parts as there are buckets; a bucket's message begins when
    its part is done and the message before it. So the last message follows the whole way back, or
    all messages follow the first part."""
    forward = compute * _FORWARD
    backward = compute - forward
    return forward + max(backward + messages / buckets, backward / buckets + messages)


def fit_overlap(alone: float, together: float, messages: float) -> Overlap:
    """Returns the overlap of two measured steps with as many rows a rank.

    Args:
        alone: seconds on one rank, which sends nothing.
        together: on several.
        messages: of their messages alone, as the link's numbers say.
    """
    if together >= alone + messages:
        slower = (together - alone) / messages if messages else 1.0
        return Overlap(1.0, max(1.0, slower))
    low, high = 1.0, _MOST
    if together <= Overlap(high).step_seconds(alone, messages):
        return Overlap(high)
    while high - low > 1e-9:
        middle = (low + high) / 2
        if Overlap(middle).step_seconds(alone, messages) > together:
            low = middle
        else:
            high = middle
    return Overlap(low)


def bubble(stages: int, microbatches: int) -> float:
    """Returns the share of a pipeline's step in which a stage waits: (S-1) / (M + S-1).

    Huang et al. 2019, GPipe, arXiv:1811.06965.
    """
    return (stages - 1) / (microbatches + stages - 1)


def buckets_of(size: float, bucket: float | None) -> int:
    """Returns the messages that ``size`` bytes are sent in; one where ``bucket`` is None."""
    return 1 if bucket is None else max(1, math.ceil(size / bucket))
