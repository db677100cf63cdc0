"""Sessions with stand-ins for AWS."""

from __future__ import annotations

from tfdist.aws import sessions


def objects(session):
    s3 = session.boto_session.client("s3")
    return [item["Key"] for item in s3.list_objects_v2(Bucket="example").get("Contents", [])]


def test_a_stand_in_on_loopback_begins_empty():
    with sessions.loopback("us-east-1", "example", "") as (session, _):
        session.boto_session.client("s3").put_object(Bucket="example", Key="left", Body=b"")
        assert objects(session) == ["left"]
    with sessions.loopback("us-east-1", "example", "") as (session, _):
        assert objects(session) == []
