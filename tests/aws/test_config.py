"""The configuration: every mistake is named before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tfdist.aws import config
from tfdist.aws.instances import CarbonTable, PriceTable
from tfdist.errors import DataError, OptionError, TfdistError

SHIPPED = Path(__file__).parents[2] / "sagemaker" / "config.yaml"


def test_the_shipped_configuration():
    wanted = config.load(SHIPPED)
    assert wanted.training.strategy == "multi_worker"
    assert wanted.data_root == "s3://tfdist-example/digits/data"
    assert wanted.data.channels["train"].mode == "File"
    assert wanted.scripts == str(SHIPPED.parent)


def test_changes_replace_what_the_file_says():
    changes = (
        "training.instance_count=4",
        "evaluation.threshold=1",
        "data.channels.train={mode: Pipe}",
        "prefix=other/",
    )
    wanted = config.load(SHIPPED, changes)
    assert wanted.training.instance_count == 4
    assert wanted.evaluation.threshold == 1.0
    assert wanted.data.channels["train"].mode == "Pipe"
    assert wanted.root == "s3://tfdist-example/other"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.epoch=3", r"key of 'training' must be a known one.*Did you mean 'epochs'"),
        ("nmae=x", r"key of a configuration must be a known one.*Did you mean 'name'"),
        ("training.epochs=three", r"'training.epochs' must be of type int"),
        ("training.epochs=0", r"training.epochs must be at least 1"),
        ("training.warmup_epochs=-1", "training.warmup_epochs must be at least 0, but found -1"),
        ("data.compression=zip", "data.compression must be a known one, but found 'zip'"),
        ("evaluation.metric=''", r"evaluation.metric must be a place in the report, .* found ''"),
        ("evaluation.metric=auc.", r"evaluation.metric must be .* found 'auc.'"),
        ("training.spot=1", r"'training.spot' must be of type bool"),
        ("training.keras=4", "training.keras must be 2 or 3, but found 4"),
        ("training.lr=1e-4", "must be a number, but found '1e-4' .*Write 0.0001 or 1.0e-4"),
        ("tuning.ranges.lr={min: 1e-4, max: 1}", "lr.min' must be a number, but found '1e-4'"),
        ("cost.spot_usd_per_hour=.nan", "'cost.spot_usd_per_hour' must be a number, but found nan"),
        ("training.metrics=[1]", r"'training.metrics\[0\]' must be of type str, but found 1"),
        ("evaluation.instance_type=foo", "must be a type of instance, as 'ml.m5.large', but fou"),
        ("registration.instance_types=[foo]", r"types\[0\]' must be a type of instance"),
        ("registration.instance_types=[5]", r"types\[0\]' must be of type str, but found 5"),
        ("registration.instance_types=[]", "instance_types must name a type of instance"),
        ("endpoint.requests_per_instance=5", "must go with endpoint.max_instances"),
        ("endpoint.instance_type=ml.g5.xlarge", "but found ml.g5.xlarge for ml.m5.large"),
        (
            "tuning={ranges: {lr: {min: 1, max: 2}}, metric: 'validation:accuracy'}",
            "larger_is_better must be given for .* but found only metric: validation:accuracy",
        ),
        ("training.framework_version='latest'", "must be a version as '2.21', but found 'latest'"),
        ("training.bucket_by_length=often", "'training.bucket_by_length' must be of type bool"),
        ("training.metrics_file=a.prom", "nobody reads it in a container"),
        ("training.channels={more: /tmp}", "training.channels.more must begin with s3://"),
        ("training.entry_point=src/mine.py", "a file among the scripts.* found src/mine.py"),
        ("training.init_weights=model.keras", "must be CHANNEL/FILE, of one of training.channels"),
        ("security={subnets: [subnet-1]}", "must be given together, but found subnets alone"),
        (
            "security={subnets: [net-1], security_group_ids: [sg-1]}",
            "security.subnets must begin with subnet-, but found 'net-1'",
        ),
        ("security.tags={cost: 7}", "security.tags must be texts, but found 'cost': 7"),
        ("security.tags={'aws:x': a}", "must not begin with aws:"),
        ("registration.approval=Maybe", "approval must be a known one.*manual, automatic"),
        ("transform.splits=test", "key of 'transform' must be a known one.*'split'"),
        ("transform.max_payload_mb=101", "must be 1 to 100, but found 101"),
        ("transform.instance_count=0", "transform.instance_count must be at least 1"),
        ("endpoint.instances=2", "key of 'endpoint' must be a known one"),
        ("endpoint={instance_count: 3, max_instances: 2}", "max_instances must be at least 3"),
        ("endpoint.serverless.memory_mb=1000", "must be 1024, 2048 and so on to 6144"),
        (
            "endpoint={serverless: {}, max_instances: 2}",
            "must have serverless or instances, but found serverless and max_instances",
        ),
        ("tuning={}", "'tuning' must have ranges, but found no ranges"),
        ("security.network_isolation=true", r"network_isolation without training\.image_uri"),
        ("security={volume_kms_key: k, tag: 1}", "key of 'security' must be a known one"),
        ("training.max_wait_s=60", "max_wait_s must be at least"),
        ("data.channels.train.mode=Fast", "Did you mean 'FastFile'"),
        (
            "data.channels.train.distribution=Sharded",
            "Choose one of FullyReplicated, ShardedByS3Key",
        ),
        ("data.folder=data/digits", "data must have a folder of shards, or a source"),
        ("data=digits", "'data' must be a mapping"),
        ("epochs", "section.key=value"),
        ("name.first=x", "must name a section"),
    ],
)
def test_a_mistake_is_named(change, message):
    with pytest.raises(OptionError, match=message):
        config.load(SHIPPED, (change,))


@pytest.mark.parametrize("kind", ["ml.g4dn.xlarge", "ml.g5.xlarge", "ml.p4d.24xlarge"])
def test_disks_that_encrypt_themselves_take_no_key(kind):
    changes = ("security.volume_kms_key=a-key", f"training.instance_type={kind}")
    with pytest.raises(OptionError, match=f"must be left out .* {kind}"):
        config.load(SHIPPED, changes)
    for more in (
        (f"endpoint.instance_type={kind}",),
        (f"registration={{group: a, instance_types: [{kind}]}}", "endpoint={}"),
    ):
        with pytest.raises(OptionError, match=f"must be left out .* {kind}"):
            config.load(SHIPPED, (changes[0], *more))
    assert config.load(SHIPPED, changes[:1]).security.volume_kms_key == "a-key"


def test_a_section_that_is_null_is_left_out():
    changes = ("tuning=", "transform=null", "endpoint=~")
    wanted = config.load(SHIPPED, changes)
    assert (wanted.tuning, wanted.transform, wanted.endpoint) == (None, None, None)


def test_a_serverless_endpoint_has_the_image_of_cpus():
    changes = ("registration.instance_types=[ml.g5.xlarge]", "endpoint.serverless={}")
    with pytest.raises(OptionError, match=r"but found serverless for ml\.g5\.xlarge"):
        config.load(SHIPPED, changes)
    assert config.load(SHIPPED, changes[1:]).endpoint_type is None


def test_a_serverless_endpoint_is_in_no_network_of_ones_own():
    changes = (
        "endpoint.serverless={}",
        "security={subnets: [subnet-1], security_group_ids: [sg-1]}",
    )
    with pytest.raises(OptionError, match=r"must do without security\.subnets"):
        config.load(SHIPPED, changes)
    assert config.load(SHIPPED, changes[:1]).endpoint.serverless.memory_mb == 2048


@pytest.mark.parametrize(
    "change",
    ["pad_to=batch", "pad_to=8", "bucket_by_length=[16, 32]", "augment=[crop]", "lr=1"],
)
def test_settings_are_as_tfdist_train_takes_them(change):
    name, _, value = change.partition("=")
    found = getattr(config.load(SHIPPED, (f"training.{change}",)).training, name)
    assert found == yaml.safe_load(value)


def test_missing_keys_are_named(tmp_path):
    (tmp_path / "c.yaml").write_text("name: x\n")
    with pytest.raises(OptionError, match="no region, role"):
        config.load(tmp_path / "c.yaml")


@pytest.mark.parametrize("text", ["a: [", "- 1"])
def test_what_is_no_configuration(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(OptionError):
        config.load(tmp_path / "c.yaml")
    with pytest.raises(OptionError, match="No such file"):
        config.load(tmp_path / "none.yaml")


def test_the_price_table_has_a_date_and_can_be_replaced(tmp_path):
    table = PriceTable.load()
    assert table.date == "2026-11-21"
    assert table["ml.p4d.24xlarge"].gpus == 8
    with pytest.raises(OptionError, match=r"Did you mean 'ml.c5.2xlarge'.*prices:"):
        table["ml.c5.2xlrge"]
    row = "{vcpus: 1, gpus: 2, usd_per_hour: 3, watts: 4}"
    (tmp_path / "p.yaml").write_text(f"date: 2030-01-01\nregion: here\ninstances:\n  ml.x: {row}\n")
    assert PriceTable.load(tmp_path / "p.yaml")["ml.x"].usd_per_hour == 3


@pytest.mark.parametrize("text", ["date: 1", "[", "instances: {a: {vcpus: 1}}\ndate: 1\nregion: a"])
def test_a_table_of_another_form_is_refused(tmp_path, text):
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(DataError):
        PriceTable.load(tmp_path / "t.yaml")
    with pytest.raises(TfdistError):
        PriceTable.load(tmp_path / "none.yaml")


def test_carbon_counts_the_data_centre_too():
    table = CarbonTable.load()
    assert table.factor("eu-north-1") == pytest.approx(0.0407 * 1.15)
    with pytest.raises(OptionError, match="region of the carbon table must be a known one"):
        table.factor("mars-1")


def test_the_sections_that_the_documentation_shows():
    text = (Path(__file__).parents[2] / "docs" / "sagemaker.md").read_text()
    blocks = [yaml.safe_load(each.split("```")[0]) for each in text.split("```yaml\n")[1:]]
    shown = {name: section for block in blocks for name, section in block.items()}
    changes = tuple(f"{name}={json.dumps(section)}" for name, section in shown.items())
    wanted = config.load(SHIPPED, changes)
    assert wanted.tuning.max_jobs == 20
    assert set(shown) == {"tuning", "transform", "registration", "endpoint"}
