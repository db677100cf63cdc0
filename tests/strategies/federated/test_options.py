"""The options of strategy "federated", who takes part in a round, and what epsilon is."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tfdist
from tfdist.errors import OptionError
from tfdist.strategies.federated.feed import Sampler
from tfdist.strategies.federated.rounds import Ledger, default_delta

IDS = tuple(f"client-{number}" for number in range(40))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "fedavgg"}, "Did you mean 'fedavg'"),
        ({"aggregation": "mode"}, "Choose one of mean, clipped_mean, median, trimmed_mean"),
        ({"batch_norm": "sync"}, "refuse, average, group_norm"),
        ({"clients_per_round": 0}, "clients_per_round must be a whole number"),
        ({"local_epochs": True}, "local_epochs"),
        ({"dropout_rate": 1.0}, "dropout_rate must be a number of at least 0 and less than 1"),
        ({"straggler_rate": -0.1}, "straggler_rate"),
        ({"server_learning_rate": 0}, "server_learning_rate must be a number of more than 0"),
        ({"client_learning_rate": math.nan}, "client_learning_rate"),
        ({"trim_fraction": 0.5}, "trim_fraction"),
        ({"quantize_bits": 17}, "quantize_bits"),
        ({"dp_clip_norm": "small"}, "'adaptive'"),
        ({"dp_delta": 1}, "dp_delta"),
        ({"min_clients": 5, "clients_per_round": 4}, "min_clients must be at most"),
        ({"proximal_strength": 0.1}, "algorithm='fedprox'"),
        ({"algorithm": "fedsgd", "local_epochs": 2}, "algorithm='fedavg'"),
        ({"dp_noise_multiplier": 1.0, "aggregation": "median"}, "an aggregation of its own"),
        ({"quantize_bits": 8, "aggregation": "median"}, "each client's own update"),
        ({"quantize_bits": 8, "secure_aggregation": True}, "in its own way"),
        ({"lr_scaling": "linear"}, "client_learning_rate"),
    ],
    ids=str,
)
def test_values_that_cannot_hold_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        tfdist.strategy("federated", **options)


def test_cohorts_are_drawn_from_the_seed_and_the_round():
    sampler = Sampler(clients_per_round=10, dropout_rate=0.5, straggler_rate=0.5, seed=4)
    first = sampler.cohort(IDS, 0)
    assert len(set(first.asked)) == 10
    assert sampler.cohort(IDS, 0) == first
    assert sampler.cohort(IDS, 1) != first
    assert sampler.cohort(IDS, 0, attempt=1) != first
    assert set(first.answering) == set(first.asked) - first.dropped
    assert all(0 <= share < 1 for share in first.shares.values())


def test_every_client_is_drawn_equally_often():
    counts = dict.fromkeys(IDS, 0)
    for number in range(400):
        for client in Sampler(clients_per_round=10).cohort(IDS, number).asked:
            counts[client] += 1
    # 100 each, of standard deviation 8.7.
    assert min(counts.values()) > 65
    assert max(counts.values()) < 135


def test_private_cohorts_vary_in_size_as_the_accounting_assumes():
    sampler = Sampler(clients_per_round=10, is_poisson=True)
    sizes = [len(sampler.cohort(IDS, number).asked) for number in range(400)]
    assert np.mean(sizes) == pytest.approx(10, abs=0.6)
    assert np.var(sizes) == pytest.approx(40 * 0.25 * 0.75, rel=0.3)


def test_all_clients_are_asked_when_no_number_is_given():
    assert Sampler(clients_per_round=None).cohort(IDS, 3).asked == IDS
    assert Sampler(clients_per_round=99).cohort(IDS, 3).asked == IDS


def test_epsilon():
    ledger = Ledger(noise_multiplier=2.0, sampling_rate=1.0, delta=1e-3)
    # The simple bound of Rényi accounting, which a better one must not exceed.
    orders = np.linspace(1.01, 60, 4000)
    simple = np.min(orders * 30 / (2 * 2.0**2) + math.log(1e3) / (orders - 1))
    assert 0.75 * simple < ledger.epsilon(30) <= simple
    assert ledger.epsilon(10) < ledger.epsilon(30)
    assert Ledger(4.0, 1.0, 1e-3).epsilon(30) < ledger.epsilon(30)
    assert Ledger(2.0, 0.1, 1e-3).epsilon(30) < ledger.epsilon(30) / 3
    assert Ledger(0.0, 1.0, 1e-3).epsilon(1) == math.inf
    assert default_delta(1000) < 1 / 1000
