"""What answers with a trained model: its container, a batch transform, an endpoint; as requests."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tfdist.aws import images, training
from tfdist.aws.channels import Shape
from tfdist.aws.config import Config
from tfdist.aws.sections import EndpointConfig, TransformConfig
from tfdist.aws.upload import UploadError, sending
from tfdist.aws.validate import Problem, check_request
from tfdist.errors import DataError, OptionError

VARIANT = "AllTraffic"
_SCALING = "application-autoscaling"
_RECORDS, _LINES = "application/x-tfrecord", "application/jsonlines"
CONTENT_TYPES = ["application/json", _LINES, _RECORDS]
RESPONSE_TYPES = ["application/json", _LINES]
_GZIP = {"none": "None", "gzip": "Gzip"}
# A name of AWS's has at most 63 characters: room for a hash.
_NAME_CHARACTERS = 54
# A minute, of each instance that scales.
_REQUESTS = 1000


def container(config: Config, artifacts: Any, kind: str) -> dict[str, Any]:
    """Returns the container of a model: AWS's with TensorFlow Serving, and ``model.tar.gz``.

    That has its handlers in code/ already, so nothing is packed again.

    Args:
        kind: of the instances that it runs on.
    """
    version = config.training.framework_version
    return {
        "Image": images.serving(version, config.region, kind).uri,
        "ModelDataUrl": artifacts,
    }


def model(config: Config, one: dict[str, Any]) -> dict[str, Any]:
    """Returns a CreateModel request, but for the model's name."""
    network = training.network(config.security)
    network.pop("EnableInterContainerTrafficEncryption", None)  # There is one container.
    made = {"ExecutionRoleArn": config.role, "PrimaryContainer": one}
    return made | network | training.tags(config.security)


def transform(
    config: Config, wanted: TransformConfig, shape: Shape, model_name: Any, source: Any, target: Any
) -> dict[str, Any]:
    """Returns the CreateTransformJob request, but for the job's name.

    inference.py is asked with whole TFRecords, frames and checksums included, which AWS leaves on
    records that it sends several at a time; each answer is a line, so nothing is put between them.

    Args:
        shape: of the split's shards.
        source, target: S3 URIs.

    Raises:
        DataError: shards that AWS cannot read, or that do not suffice for the instances.
    """
    if shape.compression not in _GZIP:
        raise DataError(
            "shards for a batch transform must be compressed with gzip or not at all",
            received=shape.compression,
            mend="Shard with --compression none",
        )
    if wanted.instance_count > shape.num_shards:
        raise DataError(
            "each instance of a batch transform must have a shard",
            received=f"{wanted.instance_count} instances for {shape.num_shards} shards",
            mend=f"Choose at most {shape.num_shards} instances, or write more shards",
        )
    security = config.security
    return {
        "ModelName": model_name,
        "BatchStrategy": "MultiRecord",
        "MaxPayloadInMB": wanted.max_payload_mb,
        "TransformInput": {
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": source}},
            "ContentType": _RECORDS,
            "CompressionType": _GZIP[shape.compression],
            "SplitType": "TFRecord",
        },
        "TransformOutput": {
            "S3OutputPath": target,
            "Accept": _LINES,
            "AssembleWith": "None",
            **training.output_key(security),
        },
        "TransformResources": {
            "InstanceType": wanted.instance_type,
            "InstanceCount": wanted.instance_count,
            **training.volume_key(security),
        },
        **training.tags(security),
    }


# Endpoints --------------------------------------------------------------------------------------


def requests(config: Config, package: str) -> dict[str, dict[str, Any]]:
    """Returns operation -> request of all that an endpoint needs; a pipeline has no such steps.

    The model and the configuration are called by what they hold: what is there already is as it
    would be made.

    Args:
        package: ARN of the registered model.

    Raises:
        OptionError: the configuration has no endpoint.
    """
    wanted = config.endpoint
    if wanted is None:
        raise OptionError(
            "the configuration must have a section endpoint",
            received="none",
            mend="Write `endpoint: {}`, or endpoint: {serverless: {memory_mb: 2048}}",
        )
    made = model(config, {"ModelPackageName": package})
    tags, key = training.tags(config.security), config.security.volume_kms_key
    settings = {"ProductionVariants": [_variant(config, wanted)]}
    settings |= ({"KmsKeyId": key} if key else {}) | tags
    text = json.dumps([made, settings], sort_keys=True)
    name = f"{config.name[:_NAME_CHARACTERS]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    settings["ProductionVariants"][0]["ModelName"] = name
    all_of_it = {
        "CreateModel": {"ModelName": name, **made},
        "CreateEndpointConfig": {"EndpointConfigName": name, **settings},
        "CreateEndpoint": {"EndpointName": config.name, "EndpointConfigName": name, **tags},
    }
    if wanted.max_instances is None:
        return all_of_it
    target = _scaled(config)
    return all_of_it | {
        "RegisterScalableTarget": {
            **target,
            "MinCapacity": wanted.instance_count or 1,
            "MaxCapacity": wanted.max_instances,
        },
        "PutScalingPolicy": {
            **target,
            "PolicyName": _policy(config),
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": {
                "TargetValue": float(wanted.requests_per_instance or _REQUESTS),
                "PredefinedMetricSpecification": {
                    "PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"
                },
            },
        },
    }


def check(made: dict[str, dict[str, Any]]) -> list[Problem]:
    """Returns all that AWS would refuse of ``requests``."""
    problems = []
    for operation, request in made.items():
        service = "sagemaker" if operation.startswith("Create") else _SCALING
        problems.extend(check_request(operation, request, operation, service))
    return problems


def _variant(config: Config, wanted: EndpointConfig) -> dict[str, Any]:
    variant: dict[str, Any] = {"VariantName": VARIANT, "InitialVariantWeight": 1.0}
    if wanted.serverless is not None:
        memory, most = wanted.serverless.memory_mb, wanted.serverless.max_concurrency
        return variant | {"ServerlessConfig": {"MemorySizeInMB": memory, "MaxConcurrency": most}}
    kind, count = config.endpoint_type, wanted.instance_count or 1
    return variant | {"InstanceType": kind, "InitialInstanceCount": count}


def _policy(config: Config) -> str:
    return f"{config.name}-requests"


def _scaled(config: Config) -> dict[str, str]:
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{config.name}/variant/{VARIANT}",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }


def deploy(config: Config, made: dict[str, dict[str, Any]], session: Any) -> None:
    """Makes an endpoint, or has the one that is there take the new model; waits until it answers.

    Args:
        made: by ``requests``.
        session: of boto3.

    Raises:
        UploadError: AWS refused, or the endpoint does not come up.
    """
    client = session.client("sagemaker")
    scaling = session.client(_SCALING)
    scales = "PutScalingPolicy" in made
    with sending("the endpoint"):
        if not _exists(client, "model", made["CreateModel"]["ModelName"]):
            client.create_model(**made["CreateModel"])
        settings = made["CreateEndpointConfig"]
        if not _exists(client, "endpoint_config", settings["EndpointConfigName"]):
            client.create_endpoint_config(**settings)
        endpoint = made["CreateEndpoint"]
        called, new = {"EndpointName": config.name}, endpoint["EndpointConfigName"]
        there = _exists(client, "endpoint", config.name)
        old = client.describe_endpoint(**called)["EndpointConfigName"] if there else None
        changes = old not in (None, new)
        if not scales or (changes and _instance_type(client, old) != config.endpoint_type):
            _end_own_scaling(scaling, config)  # AWS updates no variant's kind while it scales.
        if not there:
            client.create_endpoint(**endpoint)
        elif changes:
            # With scaling the number of instances is the load's.
            client.update_endpoint(
                **called, EndpointConfigName=new, RetainAllVariantProperties=scales
            )
        client.get_waiter("endpoint_in_service").wait(**called)
        if scales:
            scaling.register_scalable_target(**made["RegisterScalableTarget"])
            scaling.put_scaling_policy(**made["PutScalingPolicy"])
        found = client.describe_endpoint(**called)
        if found["EndpointConfigName"] != new:
            raise UploadError(
                "the endpoint must come up with the new model",
                received=f"the one before, to which AWS went back: {found.get('FailureReason')}",
                mend="Mend what AWS says, and deploy again",
            )


def _instance_type(client: Any, name: str) -> str | None:
    """Returns the kind of instances of an endpoint's configuration that AWS has."""
    settings = client.describe_endpoint_config(EndpointConfigName=name)
    return settings["ProductionVariants"][0].get("InstanceType")


def _end_own_scaling(scaling: Any, config: Config) -> None:
    """Has the endpoint scale no more where a ``deploy`` began it; what a user set stays."""
    target, own = _scaled(config), _policy(config)
    found = scaling.describe_scaling_policies(**target)["ScalingPolicies"]
    names = {policy["PolicyName"] for policy in found}
    if own in names:
        scaling.delete_scaling_policy(**target, PolicyName=own)
    if names == {own}:
        scaling.deregister_scalable_target(**target)


def _exists(client: Any, kind: str, name: str) -> bool:
    """Returns whether AWS has a model, an endpoint_config or an endpoint of this very name."""
    member = kind.title().replace("_", "")
    pages = client.get_paginator(f"list_{kind}s").paginate(NameContains=name)
    return any(each[f"{member}Name"] == name for page in pages for each in page[f"{member}s"])


# The registry -----------------------------------------------------------------------------------


def newest(config: Config, status: str, client: Any) -> str:
    """Returns the ARN of the newest model in the registry that is in a state of approval.

    Raises:
        OptionError: there is none.
        UploadError: AWS refused.
    """
    group = config.registration.group
    with sending("the registry"):
        pages = client.get_paginator("list_model_packages").paginate(
            ModelPackageGroupName=group, ModelApprovalStatus=status
        )
        found = [each for page in pages for each in page["ModelPackageSummaryList"]]
    if not found:
        raise OptionError(
            f"group '{group}' of the registry must have a model that is {status}",
            received="none",
            mend="Approve of one with `tfdist aws approve`, or name one with --package"
            if status == "Approved"
            else "Name one with --package",
        )
    return max(found, key=lambda each: each["ModelPackageVersion"])["ModelPackageArn"]
