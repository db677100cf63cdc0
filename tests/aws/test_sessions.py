"""Sessions with a stand-in for AWS: what is only looked at tells AWS nothing."""

from __future__ import annotations

import pytest

from tfdist.aws import sessions


@pytest.mark.parametrize("kind", [sessions.offline, sessions.loopback])
def test_the_sdk_does_not_report_what_it_is_used_for(kind):
    from sagemaker.config.config_schema import TELEMETRY_OPT_OUT_PATH
    from sagemaker.utils import resolve_value_from_config

    with kind("eu-west-1", "bucket", "prefix") as made:
        session = made[0] if isinstance(made, tuple) else made
        assert session.default_bucket() == "bucket"
        assert resolve_value_from_config(
            config_path=TELEMETRY_OPT_OUT_PATH, default_value=False, sagemaker_session=session
        )
