"""How long messages take: n bytes among p ranks, over a link of latency a and b seconds a byte.

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations
in MPICH"; for rings in training Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms",
and Sergeev and Del Balso 2018, arXiv:1802.05799.
"""

from __future__ import annotations

from tfdist.planning.devices import Cluster, Link


def ring(size: float, ranks: int, link: Link) -> float:
    """Returns the seconds until all ranks have the sum: 2 (p-1) a + 2 (p-1)/p n b."""
    return 2 * gather(size, ranks, link)


def gather(size: float, ranks: int, link: Link) -> float:
    """Returns the seconds of half a ring: each gets the parts of all, or its part of the sum.

    (p-1) a + (p-1)/p n b, where n are the bytes of all parts.
    """
    steps = ranks - 1
    return steps * link.latency_s + steps / ranks * size * link.seconds_per_byte


def point_to_point(size: float, link: Link) -> float:
    """Returns the seconds of one message: a + n b."""
    return link.latency_s + size * link.seconds_per_byte


def hierarchical(size: float, cluster: Cluster) -> float:
    """Returns the seconds of a sum over all devices: a ring within each host, one between hosts.

    Between hosts each device of a host adds up its part, all over the host's network: n bytes
    together. With one device a host, or one host, it is the plain ring.
    """
    within = ring(size, cluster.per_host, cluster.link)
    return within + ring(size, cluster.hosts, cluster.network)
