"""Files of records as others write them."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image

from tfdist.records.format.encoding import frame_record


def feature(value: Any) -> tf.train.Feature:
    """Returns a list of whole numbers, numbers or bytes: of a value, or of several in a list."""
    values = value if isinstance(value, list) else [value]
    if isinstance(value, tf.train.Feature):
        return value
    if values and isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if values and isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def floats(*values: float) -> tf.train.Feature:
    """Returns a list of numbers, which may be empty."""
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def _features(values: Mapping[str, Any]) -> tf.train.Features:
    return tf.train.Features(feature={name: feature(value) for name, value in values.items()})


def example(**values: Any) -> bytes:
    return tf.train.Example(features=_features(values)).SerializeToString()


def sequence_example(context: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> bytes:
    steps = {
        name: tf.train.FeatureList(feature=[feature(value) for value in values])
        for name, values in lists.items()
    }
    return tf.train.SequenceExample(
        context=_features(context), feature_lists=tf.train.FeatureLists(feature_list=steps)
    ).SerializeToString()


def write(path: Path, records: Sequence[bytes]) -> Path:
    """Writes a TFRecord file, compressed where its name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(b"".join(frame_record(record)) for record in records)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def image(height: int, width: int, kind: str = "JPEG", mode: str = "RGB") -> bytes:
    size = (height, width, *((3,) if mode == "RGB" else (4,) if mode == "RGBA" else ()))
    pixels = np.arange(np.prod(size), dtype=np.uint8).reshape(size)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def imagenet(folder: Path) -> Path:
    """Writes 6 + 2 records as Model Garden does: classes from 1, images of unequal size, boxes."""
    for split, files in (("train", 3), ("validation", 1)):
        for file in range(files):
            records = [
                example(
                    **{
                        "image/encoded": image(8 + number, 9),
                        "image/class/label": 1 + file,
                        "image/class/text": b"tench, Tinca tinca",
                        "image/height": 8 + number,
                        "image/format": b"JPEG",
                        "image/object/bbox/xmin": floats(*[0.5] * (number * 2)),
                    }
                )
                for number in range(2)
            ]
            write(folder / f"{split}-{file:05d}-of-{files:05d}", records)
    return folder


def tfds(folder: Path, said: int = 3) -> Path:
    """Writes 6 + 3 records as TensorFlow Datasets does.

    Args:
        said: records of each file, as dataset_info.json says.
    """
    package = "tensorflow_datasets.core.features"
    features = {
        "image": {
            "pythonClassName": f"{package}.image_feature.Image",
            "image": {
                "shape": {"dimensions": ["-1", "-1", "1"]},
                "dtype": "uint8",
                "encodingFormat": "png",
            },
        },
        "label": {
            "pythonClassName": f"{package}.class_label_feature.ClassLabel",
            "classLabel": {"numClasses": "3"},
        },
        "grid": {
            "pythonClassName": f"{package}.tensor_feature.Tensor",
            "tensor": {
                "shape": {"dimensions": ["2", "3"]},
                "dtype": "uint8",
                "encoding": "none",
            },
        },
        "packed": {
            "pythonClassName": f"{package}.tensor_feature.Tensor",
            "tensor": {"shape": {"dimensions": ["2"]}, "dtype": "int16", "encoding": "bytes"},
        },
        "objects": {
            "pythonClassName": f"{package}.sequence_feature.Sequence",
            "sequence": {
                "feature": {
                    "pythonClassName": f"{package}.features_dict.FeaturesDict",
                    "featuresDict": {
                        "features": {
                            "bbox": {
                                "pythonClassName": f"{package}.bounding_boxes.BBoxFeature",
                                "boundingBox": {
                                    "shape": {"dimensions": ["4"]},
                                    "dtype": "float32",
                                },
                            }
                        }
                    },
                },
                "length": "-1",
            },
        },
    }
    number = 0
    for split, files in (("train", 2), ("test", 1)):
        for file in range(files):
            records = []
            for _ in range(3):
                records.append(
                    example(
                        **{
                            "image": image(5, 6, "PNG", "L"),
                            "label": number % 3,
                            "grid": [number] * 6,
                            "packed": np.array([number, -1], "<i2").tobytes(),
                            "objects/bbox": floats(*[0.25] * (4 * (number % 3))),
                        }
                    )
                )
                number += 1
            write(folder / f"tiny-{split}.tfrecord-{file:05d}-of-{files:05d}", records)
    root = {
        "pythonClassName": f"{package}.features_dict.FeaturesDict",
        "featuresDict": {"features": features},
    }
    (folder / "features.json").write_text(json.dumps(root))
    (folder / "label.labels.txt").write_text("a\nb\nc\n")
    keys = {"tuple": {"items": [{"featureKey": "image"}, {"featureKey": "label"}]}}
    splits = [
        {"name": "train", "shardLengths": [str(said), "3"]},
        {"name": "test", "shardLengths": ["3"]},
    ]
    info = {"name": "tiny", "fileFormat": "tfrecord", "supervisedKeys": keys, "splits": splits}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder
