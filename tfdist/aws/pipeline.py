"""The SageMaker pipeline: shard, train, evaluate, decide, then register or fail."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tfdist.aws import estimator as estimators
from tfdist.aws.channels import Channel, Shape, channels, check_shards, shapes
from tfdist.aws.config import ChannelConfig, Config
from tfdist.aws.container import MANIFEST_CHANNEL
from tfdist.aws.evaluation import REPORT
from tfdist.aws.instances import PriceTable
from tfdist.errors import OptionError

PROCESSING_DIR = "/opt/ml/processing"
_CONTENT_TYPES = ["application/json", "application/jsonlines", "application/x-tfrecord"]
_RESPONSE_TYPES = ["application/json", "application/jsonlines"]


def splits(config: Config) -> dict[str, Shape]:
    """Returns the shape of the data's splits: from its manifest, or as the first step is to write.

    Raises:
        TfdistError: no shards in ``data.folder``, or a split that cannot be read.
    """
    if config.data.folder is not None:
        from tfdist.records.format.manifest import load_manifest

        return shapes(load_manifest(config.data.folder))
    from tfdist.records.format.splits import parse_split

    shape = Shape(config.data.num_shards, config.data.compression)
    return dict.fromkeys(parse_split(config.data.split), shape)


def training_channels(config: Config) -> list[Channel]:
    """Returns the channels of the training step. Raises TfdistError: see ``channels``."""
    instance = PriceTable.load(_prices(config))[config.training.instance_type]
    known = splits(config)
    if config.evaluation.split not in known:
        raise OptionError(
            "evaluation.split must be a split of the data",
            received=config.evaluation.split,
            mend=f"Choose one of {', '.join(known)}",
        )
    check_shards(config.evaluation.split, known[config.evaluation.split], ChannelConfig(), 1)
    return channels(
        known,
        config.data.channels,
        config.data_root,
        hosts=config.training.instance_count,
        processes_per_host=estimators.processes_per_host(config.training, instance),
    )


def _prices(config: Config) -> Path | None:
    return None if config.prices is None else Path(config.prices)


def build(config: Config, source: Path, session: Any) -> Any:
    """Returns the SDK's Pipeline. Uploads the code through ``session`` when it is defined.

    Args:
        source: the folder that ``bundle.collect`` made.
        session: a PipelineSession of ``sessions``.

    Raises:
        TfdistError: a configuration that AWS would refuse, or that would fail there.
    """
    from sagemaker.workflow.parameters import ParameterFloat, ParameterInteger, ParameterString
    from sagemaker.workflow.pipeline import Pipeline

    from tfdist.aws.sessions import sdk_errors

    builder = _Builder(
        config,
        source,
        session,
        threshold=ParameterFloat("Threshold", config.evaluation.threshold),
        approval=ParameterString("ApprovalStatus", config.registration.approval),
        epochs=ParameterInteger("Epochs", config.training.epochs),
    )
    with sdk_errors():
        steps = builder.steps()
    return Pipeline(
        name=config.name,
        parameters=[builder.threshold, builder.approval, builder.epochs],
        steps=steps,
        sagemaker_session=session,
    )


@dataclasses.dataclass
class _Builder:
    config: Config
    source: Path
    session: Any
    threshold: Any
    approval: Any
    epochs: Any

    def steps(self) -> list[Any]:
        shard = self._shard() if self.config.data.source is not None else None
        train = self._train(shard)
        evaluate, report = self._evaluate(train, shard)
        check = self._check(evaluate, report, train)
        return [step for step in (shard, train, evaluate, check) if step is not None]

    def _processor(self, instance_type: str) -> Any:
        from sagemaker.tensorflow import TensorFlowProcessor

        return TensorFlowProcessor(
            framework_version=self.config.training.framework_version,
            py_version=self.config.training.py_version,
            image_uri=self.config.training.image_uri or self._cpu_image(),
            command=["python3"],
            role=self.config.role,
            instance_count=1,
            instance_type=instance_type,
            code_location=f"{self.config.root}/code",
            sagemaker_session=self.session,
        )

    def _cpu_image(self) -> str:
        from sagemaker import image_uris

        return image_uris.retrieve(
            "tensorflow",
            self.config.region,
            version=self.config.training.framework_version,
            py_version=self.config.training.py_version,
            instance_type=self.config.evaluation.instance_type,
            image_scope="training",
        )

    def _shard(self) -> Any:
        from sagemaker.processing import ProcessingInput, ProcessingOutput
        from sagemaker.workflow.steps import ProcessingStep

        data = self.config.data
        source, inputs = data.source, []
        if source.startswith("s3://"):
            folder = f"{PROCESSING_DIR}/input/raw"
            inputs = [ProcessingInput(source=source, destination=folder, input_name="raw")]
            # A file of a table is called by its own name; a folder of images is the folder.
            is_file = source.endswith((".csv", ".npz"))
            source = f"{folder}/{source.rsplit('/', 1)[1]}" if is_file else folder
        output = f"{PROCESSING_DIR}/output"
        arguments = {
            "source": source,
            "output": output,
            "num-shards": data.num_shards,
            "split": data.split,
            "stratify": str(data.stratify).lower(),
            "compression": data.compression,
        }
        if data.label is not None:
            arguments["label"] = data.label
        outputs = [
            ProcessingOutput(
                output_name=name,
                source=f"{output}/{name}",
                destination=self._of_run(f"data/{name}"),
            )
            for name in (MANIFEST_CHANNEL, *splits(self.config))
        ]
        return ProcessingStep(
            "Shard",
            step_args=self._processor(data.instance_type).run(
                code="shard.py",
                source_dir=str(self.source),
                inputs=inputs or None,
                outputs=outputs,
                arguments=_arguments(arguments),
            ),
        )

    def _of_run(self, folder: str) -> Any:
        """Returns a place in S3 that no other execution of the pipeline uses."""
        from sagemaker.workflow.execution_variables import ExecutionVariables
        from sagemaker.workflow.functions import Join

        execution = ExecutionVariables.PIPELINE_EXECUTION_ID
        return Join(on="/", values=[f"{self.config.root}/runs", execution, folder])

    def _uri(self, shard: Any, folder: str) -> Any:
        """Returns where a channel's data lies; of a first step's, as that step's own output."""
        if shard is None:
            return f"{self.config.data_root}/{folder}/"
        return shard.properties.ProcessingOutputConfig.Outputs[folder].S3Output.S3Uri

    def _train(self, shard: Any) -> Any:
        from sagemaker.inputs import TrainingInput
        from sagemaker.workflow.steps import TrainingStep

        config = self.config
        instance = PriceTable.load(_prices(config))[config.training.instance_type]
        changes = {"epochs": self.epochs} if config.training.entry_point == "train.py" else {}
        estimator = estimators.make(
            config,
            instance,
            self.source,
            self.session,
            checkpoints=self._of_run("checkpoints"),
            **changes,
        )
        inputs = {
            channel.name: TrainingInput(
                self._uri(shard, channel.uri.rstrip("/").rsplit("/", 1)[1]),
                distribution=channel.distribution,
                input_mode=channel.mode,
                content_type="application/x-tfrecord",
            )
            for channel in training_channels(config)
        }
        return TrainingStep("Train", step_args=estimator.fit(inputs))

    def _evaluate(self, train: Any, shard: Any) -> tuple[Any, Any]:
        from sagemaker.processing import ProcessingInput, ProcessingOutput
        from sagemaker.workflow.properties import PropertyFile
        from sagemaker.workflow.steps import ProcessingStep

        split = self.config.evaluation.split
        artifacts = train.properties.ModelArtifacts.S3ModelArtifacts
        sources = {
            "model": artifacts,
            "manifest": self._uri(shard, MANIFEST_CHANNEL),
            "data": self._uri(shard, split),
        }
        folders = {name: f"{PROCESSING_DIR}/input/{name}" for name in sources}
        output = f"{PROCESSING_DIR}/output/evaluation"
        report = PropertyFile("EvaluationReport", output_name="evaluation", path=REPORT)
        step_args = self._processor(self.config.evaluation.instance_type).run(
            code="evaluate.py",
            source_dir=str(self.source),
            inputs=[
                ProcessingInput(source=uri, destination=folders[name], input_name=name)
                for name, uri in sources.items()
            ],
            outputs=[
                ProcessingOutput(
                    output_name="evaluation",
                    source=output,
                    destination=self._of_run("evaluation"),
                )
            ],
            arguments=_arguments({**folders, "split": split, "output": output}),
        )
        return ProcessingStep("Evaluate", step_args=step_args, property_files=[report]), report

    def _check(self, evaluate: Any, report: Any, train: Any) -> Any:
        from sagemaker.workflow.condition_step import ConditionStep
        from sagemaker.workflow.conditions import (
            ConditionGreaterThanOrEqualTo,
            ConditionLessThanOrEqualTo,
        )
        from sagemaker.workflow.fail_step import FailStep
        from sagemaker.workflow.functions import Join, JsonGet

        wanted = self.config.evaluation
        reaches = (
            ConditionGreaterThanOrEqualTo if wanted.larger_is_better else ConditionLessThanOrEqualTo
        )
        value = JsonGet(step_name=evaluate.name, property_file=report, json_path=wanted.metric)
        than = "below" if wanted.larger_is_better else "above"
        fail = FailStep(
            "Refuse",
            error_message=Join(on=" ", values=[wanted.metric, "is", than, self.threshold]),
        )
        return ConditionStep(
            "Decide",
            conditions=[reaches(left=value, right=self.threshold)],
            if_steps=[self._register(train, evaluate)],
            else_steps=[fail],
        )

    def _register(self, train: Any, evaluate: Any) -> Any:
        from sagemaker.model_metrics import MetricsSource, ModelMetrics
        from sagemaker.tensorflow import TensorFlowModel
        from sagemaker.workflow.model_step import ModelStep

        config = self.config
        # model.tar.gz has its handlers in code/ already, so nothing is packed again.
        model = TensorFlowModel(
            model_data=train.properties.ModelArtifacts.S3ModelArtifacts,
            role=config.role,
            framework_version=config.training.framework_version,
            sagemaker_session=self.session,
        )
        quality = MetricsSource(
            s3_uri=self._of_run(f"evaluation/{REPORT}"), content_type="application/json"
        )
        step_args = model.register(
            content_types=_CONTENT_TYPES,
            response_types=_RESPONSE_TYPES,
            inference_instances=config.registration.instance_types,
            transform_instances=config.registration.instance_types,
            model_package_group_name=config.registration.group,
            approval_status=self.approval,
            model_metrics=ModelMetrics(model_statistics=quality),
            description=f"{config.model}, strategy {config.training.strategy}, by tfdist",
        )
        # It reads evaluation.json, which is no property of a step.
        return ModelStep("Register", step_args=step_args, depends_on=[evaluate.name])


def _arguments(values: dict[str, Any]) -> list[str]:
    return [text for key, value in values.items() for text in (f"--{key}", str(value))]
