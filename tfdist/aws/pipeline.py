"""The SageMaker pipeline: shard, train or tune, evaluate, decide, then register or fail."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfdist.aws import bundle, definition, images, serving, sharding, training, tuning
from tfdist.aws.bundle import ARCHIVE, Code
from tfdist.aws.channels import Channel, Shape, channels, check_shards, shapes
from tfdist.aws.config import ChannelConfig, Config
from tfdist.aws.container import MANIFEST_CHANNEL
from tfdist.aws.evaluation import REPORT
from tfdist.aws.sections import APPROVALS
from tfdist.aws.upload import encryption
from tfdist.aws.validate import Problem
from tfdist.errors import OptionError
from tfdist.records.format.manifest import load_manifest

PROCESSING_DIR = "/opt/ml/processing"
_CODE_DIR = f"{PROCESSING_DIR}/input/code"
# Its arguments follow: the name of a script, and what that takes.
_START = f"cd {_CODE_DIR} && tar -xzf {ARCHIVE} && python3 -m pip install -r requirements.txt "
_START += '&& exec python3 "$0" "$@"'
_PROCESSING_GB = 30
_REPORT = "EvaluationReport"


def splits(config: Config) -> dict[str, Shape]:
    """Returns the shape of the data's splits: from its manifest, or as the first step is to write.

    Raises:
        TfdistError: no shards in ``data.folder``, or a split that cannot be read.
    """
    if config.data.folder is not None:
        return shapes(load_manifest(config.data.folder))
    from tfdist.records.format.splits import parse_split

    shape = Shape(config.data.num_shards, config.data.compression)
    return dict.fromkeys(parse_split(config.data.split), shape)


def training_channels(config: Config) -> list[Channel]:
    """Returns the channels of the training step. Raises TfdistError: see ``channels``."""
    instance = config.price_table[config.training.instance_type]
    known = splits(config)
    for part in ("evaluation", "transform"):
        wanted = getattr(config, part)
        if wanted is not None and wanted.split not in known:
            raise OptionError(
                f"{part}.split must be a split of the data",
                received=wanted.split,
                mend=f"Choose one of {', '.join(known)}",
            )
    check_shards(config.evaluation.split, known[config.evaluation.split], ChannelConfig(), 1)
    return channels(
        known,
        config.data.channels,
        config.data_root,
        hosts=config.training.instance_count,
        processes_per_host=training.processes_per_host(config.training, instance),
    )


def build(config: Config, code_uri: str) -> dict[str, Any]:
    """Returns the pipeline's definition, as AWS takes it in JSON.

    Args:
        code_uri: of what ``bundle.pack`` made.

    Raises:
        TfdistError: a configuration that AWS would refuse, or that would fail there.
    """
    parameters = {
        "Threshold": ("Float", config.evaluation.threshold),
        "ApprovalStatus": ("String", APPROVALS[config.registration.approval]),
    }
    if config.tuning is None or "epochs" not in config.tuning.ranges:
        parameters["Epochs"] = ("Integer", config.training.epochs)
    return {
        "Version": "2020-12-01",
        "Metadata": {},
        "Parameters": [
            {"Name": name, "Type": kind, "DefaultValue": value}
            for name, (kind, value) in parameters.items()
        ],
        "PipelineExperimentConfig": {
            "ExperimentName": _get("Execution.PipelineName"),
            "TrialName": _get("Execution.PipelineExecutionId"),
        },
        "Steps": _Builder(config, code_uri).steps(),
    }


def checked(config: Config) -> tuple[dict[str, Any], Code, list[Problem]]:
    """Returns the definition, the code that it names, and what AWS would refuse; without AWS."""
    code = bundle.pack(config)
    made = build(config, code.uri)
    return made, code, definition.check(made, name=config.name, role=config.role)


def _get(path: str) -> dict[str, Any]:
    return {"Get": path}


def _join(on: str, *values: Any) -> dict[str, Any]:
    return {"Std:Join": {"On": on, "Values": list(values)}}


def _step(name: str, kind: str, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"Name": name, "Type": kind, "Arguments": arguments, **more}


def _is_file(name: str) -> bool:
    from tfdist.records.writing.streams import tar_files
    from tfdist.records.writing.tables.files import kind_of_file

    kind = kind_of_file(Path(name))
    return kind is not None or name.lower().endswith((".npz", ".npy", *tar_files.SUFFIXES))


@dataclass
class _Builder:
    config: Config
    code_uri: str

    def steps(self) -> list[dict[str, Any]]:
        first = [self._shard()] if self.config.data.source is not None else []
        return [*first, self._train(), self._evaluate(), self._decide()]

    def _process(
        self,
        script: str,
        instance_type: str,
        inputs: dict[str, Any],
        outputs: dict[str, tuple[str, Any]],
        arguments: dict[str, Any],
    ) -> dict[str, Any]:
        """Returns a CreateProcessingJob request, but for the job's name.

        Args:
            inputs: name -> S3 URI; each lies in ``PROCESSING_DIR/input/NAME``.
            outputs: name -> (folder, S3 URI).
        """
        config = self.config
        security = config.security
        network = training.network(security)
        return {
            "ProcessingResources": {
                "ClusterConfig": {
                    "InstanceType": instance_type,
                    "InstanceCount": 1,
                    "VolumeSizeInGB": _PROCESSING_GB,
                    **training.volume_key(security),
                }
            },
            "AppSpecification": {
                "ImageUri": training.image(config, instance_type),
                "ContainerEntrypoint": ["/bin/bash", "-c", _START, script],
                "ContainerArguments": [
                    text for key, value in arguments.items() for text in (f"--{key}", str(value))
                ],
            },
            "RoleArn": config.role,
            "ProcessingInputs": [
                {
                    "InputName": name,
                    "S3Input": {
                        "S3Uri": uri,
                        "LocalPath": f"{PROCESSING_DIR}/input/{name}",
                        "S3DataType": "S3Prefix",
                        "S3InputMode": "File",
                    },
                }
                for name, uri in {**inputs, "code": self.code_uri}.items()
            ],
            "ProcessingOutputConfig": {
                "Outputs": [
                    {
                        "OutputName": name,
                        "S3Output": {
                            "S3Uri": uri,
                            "LocalPath": folder,
                            "S3UploadMode": "EndOfJob",
                        },
                    }
                    for name, (folder, uri) in outputs.items()
                ],
                **training.output_key(security),
            },
            **({"NetworkConfig": network} if network else {}),
            **training.tags(security),
        }

    def _shard(self) -> dict[str, Any]:
        data = self.config.data
        source, inputs = data.source, {}
        if source.startswith("s3://"):
            inputs = {"raw": source}
            # A file is called by its own name; a folder of images is the folder.
            name = source.rsplit("/", 1)[1]
            folder = f"{PROCESSING_DIR}/input/raw"
            source = f"{folder}/{name}" if _is_file(name) else folder
        output = f"{PROCESSING_DIR}/output"
        given = {name: getattr(data, name) for name in sharding.OPTIONS}
        given["stratify"] = str(data.stratify).lower()
        arguments = {name.replace("_", "-"): own for name, own in given.items() if own is not None}
        arguments = {"source": source, "output": output, **arguments}
        outputs = {
            name: (f"{output}/{name}", self._of_run(f"data/{name}"))
            for name in (MANIFEST_CHANNEL, *splits(self.config))
        }
        request = self._process("shard.py", data.instance_type, inputs, outputs, arguments)
        return _step("Shard", "Processing", request)

    def _of_run(self, folder: str) -> dict[str, Any]:
        """Returns a place in S3 that no other execution of the pipeline uses."""
        return _join("/", f"{self.config.root}/runs", _get("Execution.PipelineExecutionId"), folder)

    def _uri(self, folder: str, end: str = "") -> Any:
        """Returns where a channel's data lies; of a first step's, as that step's own output.

        Args:
            end: "/" where nothing looks at names: "test" must not match "test-2".
        """
        if self.config.data.source is None:
            return f"{self.config.data_root}/{folder}/"
        outputs = "Steps.Shard.ProcessingOutputConfig.Outputs"
        uri = _get(f"{outputs}['{folder}'].S3Output.S3Uri")
        return _join("", uri, end) if end else uri

    def _train(self) -> dict[str, Any]:
        config = self.config
        instance = config.price_table[config.training.instance_type]
        inputs = [
            replace(channel, uri=self._uri(channel.uri.rstrip("/").rsplit("/", 1)[1], "/"))
            for channel in training_channels(config)
        ]
        request = training.request(
            config, instance, self.code_uri, inputs, self._of_run("checkpoints")
        )
        if config.training.entry_point == "train.py":
            request["HyperParameters"]["epochs"] = _join("", _get("Parameters.Epochs"))
        if config.tuning is None:
            return _step("Train", "Training", request)
        return _step("Tune", "Tuning", tuning.request(config, config.tuning, request))

    def _artifacts(self) -> dict[str, Any]:
        """Returns where the trained model lies: a search's, where its best training left it."""
        if self.config.tuning is None:
            return _get("Steps.Train.ModelArtifacts.S3ModelArtifacts")
        best = _get("Steps.Tune.BestTrainingJob.TrainingJobName")
        return _join("/", f"{self.config.root}/output", best, "output/model.tar.gz")

    def _evaluate(self) -> dict[str, Any]:
        wanted = self.config.evaluation
        inputs = {
            "model": self._artifacts(),
            "manifest": self._uri(MANIFEST_CHANNEL),
            "data": self._uri(wanted.split),
        }
        folders = {name: f"{PROCESSING_DIR}/input/{name}" for name in inputs}
        output = f"{PROCESSING_DIR}/output/evaluation"
        outputs = {"evaluation": (output, self._of_run("evaluation"))}
        arguments = {**folders, "split": wanted.split, "output": output}
        request = self._process("evaluate.py", wanted.instance_type, inputs, outputs, arguments)
        file = {"PropertyFileName": _REPORT, "OutputName": "evaluation", "FilePath": REPORT}
        return _step("Evaluate", "Processing", request, PropertyFiles=[file])

    def _decide(self) -> dict[str, Any]:
        wanted = self.config.evaluation
        threshold = _get("Parameters.Threshold")
        reaches, misses = ("GreaterThanOrEqualTo", "below")
        if not wanted.wants_larger:
            reaches, misses = ("LessThanOrEqualTo", "above")
        file = _get(f"Steps.Evaluate.PropertyFiles.{_REPORT}")
        condition = {
            "Type": reaches,
            "LeftValue": {"Std:JsonGet": {"PropertyFile": file, "Path": wanted.metric}},
            "RightValue": threshold,
        }
        message = _join(" ", wanted.metric, "is", misses, threshold)
        # Registering reads evaluation.json, which is no property of a step.
        register = _step(
            "Register-RegisterModel", "RegisterModel", self._register(), DependsOn=["Evaluate"]
        )
        arguments = {
            "Conditions": [condition],
            "IfSteps": [register, *self._transform()],
            "ElseSteps": [_step("Refuse", "Fail", {"ErrorMessage": message})],
        }
        return _step("Decide", "Condition", arguments)

    def _transform(self) -> list[dict[str, Any]]:
        wanted = self.config.transform
        if wanted is None:
            return []
        one = serving.container(self.config, self._artifacts(), wanted.instance_type)
        request = serving.transform(
            self.config,
            wanted,
            splits(self.config)[wanted.split],
            _get("Steps.Model.ModelName"),
            self._uri(wanted.split, "/"),
            self._of_run("transform"),
        )
        return [
            _step("Model", "Model", serving.model(self.config, one)),
            _step("Transform", "Transform", request),
        ]

    def _register(self) -> dict[str, Any]:
        config = self.config
        wanted = config.registration
        kind = wanted.instance_types[0]
        image = images.serving(config.training.framework_version, config.region, kind)
        quality = {
            "ContentType": "application/json",
            "S3Uri": self._of_run(f"evaluation/{REPORT}"),
        }
        return {
            "ModelPackageGroupName": wanted.group,
            "ModelPackageDescription": f"{config.model}, strategy {config.training.strategy}, "
            "by tfdist",
            "ModelMetrics": {"ModelQuality": {"Statistics": quality}},
            "InferenceSpecification": {
                "Containers": [
                    {
                        **serving.container(config, self._artifacts(), kind),
                        "Framework": "TENSORFLOW",
                        "FrameworkVersion": image.version,
                    }
                ],
                "SupportedContentTypes": serving.CONTENT_TYPES,
                "SupportedResponseMIMETypes": serving.RESPONSE_TYPES,
                "SupportedRealtimeInferenceInstanceTypes": wanted.instance_types,
                "SupportedTransformInstanceTypes": wanted.instance_types,
            },
            "ModelApprovalStatus": _get("Parameters.ApprovalStatus"),
        }


def upsert(config: Config, made: dict[str, Any], code: Code, session: Any) -> str:
    """Sends the code, then creates or updates the pipeline; returns its ARN.

    Args:
        made, code: by ``checked``.
        session: of boto3.
    """
    code.upload(session.client("s3"), encryption(config.security.output_kms_key))
    client = session.client("sagemaker")
    request = {
        "PipelineName": config.name,
        "PipelineDefinition": json.dumps(made),
        "RoleArn": config.role,
    }
    try:
        return client.create_pipeline(**request, **training.tags(config.security))["PipelineArn"]
    except client.exceptions.ClientError as error:
        if "names must be unique" not in str(error):
            raise
    return client.update_pipeline(**request)["PipelineArn"]
