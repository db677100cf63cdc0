"""The options of strategy "federated", checked where they are given."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfdist.errors import OptionError, unknown_choice

ALGORITHMS = ("fedavg", "fedprox", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedsgd")
BATCH_NORMS = ("refuse", "average", "group_norm")
AGGREGATIONS = ("mean", "clipped_mean", "median", "trimmed_mean")

# The server's learning rate where none is given; the adaptive ones are Reddi et al.'s 10^-1.5.
_SERVER_RATES = {"fedadagrad": 0.03, "fedadam": 0.03, "fedyogi": 0.03}


@dataclass(frozen=True, kw_only=True)
class Options:
    """See ``Federated``.

    Raises:
        OptionError: an unknown name, a value out of range, or options that exclude each other.
    """

    algorithm: str
    clients_per_round: int | None
    local_epochs: int
    local_batch_size: int | None
    client_learning_rate: float | None
    server_learning_rate: float | None
    proximal_strength: float | None
    batch_norm: str
    dropout_rate: float
    straggler_rate: float
    min_clients: int
    max_attempts: int
    aggregation: str
    trim_fraction: float
    quantize_bits: int | None
    secure_aggregation: bool
    dp_noise_multiplier: float | None
    dp_clip_norm: float | str
    dp_delta: float | None
    sampling_seed: int

    def __post_init__(self) -> None:
        for name, known in (
            ("algorithm", ALGORITHMS),
            ("batch_norm", BATCH_NORMS),
            ("aggregation", AGGREGATIONS),
        ):
            if getattr(self, name) not in known:
                raise unknown_choice(name, getattr(self, name), known)
        for name in ("local_epochs", "min_clients", "max_attempts"):
            _check_whole(name, getattr(self, name), at_least=1)
        for name in ("clients_per_round", "local_batch_size"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), at_least=1)
        _check_whole("sampling_seed", self.sampling_seed, at_least=0)
        for name in ("client_learning_rate", "server_learning_rate", "proximal_strength"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), low=0, open_low=True)
        for name in ("dropout_rate", "straggler_rate"):
            _check_number(name, getattr(self, name), low=0, high=1, open_high=True)
        _check_number("trim_fraction", self.trim_fraction, low=0, high=0.5, open_high=True)
        asked = self.clients_per_round
        if asked is not None and self.min_clients > asked:
            raise OptionError(
                "min_clients must be at most clients_per_round",
                received=f"min_clients={self.min_clients}, clients_per_round={asked}",
                mend=f"Choose min_clients={asked} or fewer, or more clients_per_round",
            )
        self._check_algorithm()
        self._check_privacy()
        self._check_aggregation()

    @property
    def is_private(self) -> bool:
        return self.dp_noise_multiplier is not None

    @property
    def server_rate(self) -> float:
        if self.server_learning_rate is not None:
            return self.server_learning_rate
        return _SERVER_RATES.get(self.algorithm, 1.0)

    @property
    def sees_each_client(self) -> str | None:
        """What asks for each client's own update at the server; None where sums of some do."""
        if self.aggregation != "mean":
            return f"aggregation='{self.aggregation}'"
        if self.secure_aggregation:
            return "secure_aggregation"
        return None if self.quantize_bits is None else f"quantize_bits={self.quantize_bits}"

    def _check_algorithm(self) -> None:
        if self.proximal_strength is not None and self.algorithm != "fedprox":
            raise OptionError(
                "proximal_strength must go with algorithm='fedprox'",
                received=f"algorithm='{self.algorithm}'",
                mend="Leave proximal_strength out, or choose algorithm='fedprox'",
            )
        if self.algorithm != "fedsgd":
            return
        for name, plain in (
            ("local_epochs", 1),
            ("client_learning_rate", None),
            ("server_learning_rate", None),
            ("straggler_rate", 0),
        ):
            if getattr(self, name) != plain:
                raise OptionError(
                    "a client of algorithm='fedsgd' must compute one gradient only, which the "
                    "compiled optimizer applies on the server",
                    received=f"{name}={getattr(self, name)}",
                    mend=f"Leave {name} out, or use algorithm='fedavg'",
                )

    def _check_privacy(self) -> None:
        if self.dp_clip_norm != "adaptive":
            if isinstance(self.dp_clip_norm, str):
                raise OptionError(
                    "dp_clip_norm must be a number or 'adaptive'",
                    received=repr(self.dp_clip_norm),
                    mend="Leave it out, for 'adaptive'",
                )
            _check_number("dp_clip_norm", self.dp_clip_norm, low=0, open_low=True)
        if self.dp_delta is not None:
            _check_number("dp_delta", self.dp_delta, low=0, high=1, open_low=True, open_high=True)
        if not self.is_private:
            return
        _check_number("dp_noise_multiplier", self.dp_noise_multiplier, low=0)
        for name, plain in (
            ("aggregation", "mean"),
            ("quantize_bits", None),
            ("secure_aggregation", False),
        ):
            if getattr(self, name) != plain:
                raise OptionError(
                    "differential privacy must have an aggregation of its own",
                    received=f"{name}={getattr(self, name)} with dp_noise_multiplier",
                    mend=f"Leave {name} out, or dp_noise_multiplier",
                )

    def _check_aggregation(self) -> None:
        if self.quantize_bits is not None:
            _check_whole("quantize_bits", self.quantize_bits, at_least=1)
            if self.quantize_bits > 16:
                raise OptionError(
                    "quantize_bits must be at most 16",
                    received=self.quantize_bits,
                    mend="Choose for example 8",
                )
        robust = self.aggregation in ("median", "trimmed_mean")
        if robust and (self.quantize_bits is not None or self.secure_aggregation):
            raise OptionError(
                f"aggregation='{self.aggregation}' must see each client's own update",
                received="quantize_bits or secure_aggregation beside it",
                mend="Leave that out, or use aggregation='clipped_mean'",
            )
        if self.secure_aggregation and self.quantize_bits is not None:
            raise OptionError(
                "secure aggregation must be left to encode updates in its own way",
                received=f"quantize_bits={self.quantize_bits} with secure_aggregation",
                mend="Leave one of them out",
            )


def _check_whole(name: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise OptionError(
            f"{name} must be a whole number of at least {at_least}",
            received=repr(value),
            mend=f"Choose {at_least} or more",
        )


def _check_number(
    name: str,
    value: object,
    *,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        above = value > low if open_low else value >= low
        below = value < high if open_high else value <= high
        if above and below:
            return
    bounds = f"{'more than' if open_low else 'at least'} {low:g}"
    if high != math.inf:
        bounds += f" and {'less than' if open_high else 'at most'} {high:g}"
    raise OptionError(
        f"{name} must be a number of {bounds}",
        received=repr(value),
        mend="Choose such a number, or leave it out for the default",
    )
