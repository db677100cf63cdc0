"""What the options of ``tfdist serve`` ask for."""

from __future__ import annotations

import pytest

from tfdist.cli.serve import scaling_asked
from tfdist.errors import OptionError
from tfdist.serving.scaling import Scaling


def test_a_fixed_number_and_bounds_exclude_each_other():
    def asked(**given) -> Scaling:
        names = ("replicas", "min_replicas", "max_replicas")
        names += ("target_requests", "up_delay_s", "down_delay_s")
        return scaling_asked(**(dict.fromkeys(names) | given))

    assert (asked().least, asked().most, asked().is_scaled) == (1, 1, False)
    assert asked(min_replicas=3) == Scaling(3, 3, 8.0, 5.0, 60.0)
    with pytest.raises(OptionError, match=r"must go with --min-replicas.*found neither"):
        asked(replicas=2, up_delay_s=0.0)
    assert asked(replicas=3).first == 3
    assert (asked(min_replicas=0, max_replicas=2).first, asked(max_replicas=2).least) == (1, 1)
    with pytest.raises(OptionError, match="must go without --min-replicas"):
        asked(replicas=1, max_replicas=2)
    with pytest.raises(OptionError, match="found 3 and 2"):
        asked(min_replicas=3, max_replicas=2)
