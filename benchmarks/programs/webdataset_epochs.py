"""Epochs of photos in .tar files through webdataset: ``webdataset_epochs.py SIDE BATCH TAR...``.

Runs in webdataset's own environment, so it imports nothing of this project. A process for each
file, as PyTorch's loader would have them: for each line on standard input all read theirs once, and
the number of images is printed. Batches end in the process that made them.
"""

from __future__ import annotations

import multiprocessing
import random
import sys

import numpy as np
import webdataset
from PIL import Image

_SIDE, _BATCH, _FILES = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
_MARGIN = _SIDE // 8


def _changed(image: Image.Image) -> np.ndarray:
    """Resized, mirrored in half of the cases, and cut out of what an eighth around it mirrors."""
    image = image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    around = ((_MARGIN, _MARGIN), (_MARGIN, _MARGIN), (0, 0))
    padded = np.pad(np.asarray(image), around, mode="reflect")
    top, left = random.randint(0, 2 * _MARGIN), random.randint(0, 2 * _MARGIN)
    return padded[top : top + _SIDE, left : left + _SIDE]


def _epoch(file: str) -> int:
    dataset = webdataset.WebDataset(file, shardshuffle=False).decode("pil").to_tuple("jpg", "cls")
    return sum(len(x) for x, _ in dataset.map_tuple(_changed, int).batched(_BATCH))


if __name__ == "__main__":
    with multiprocessing.Pool(len(_FILES)) as processes:
        for _ in sys.stdin:
            print(sum(processes.map(_epoch, _FILES, chunksize=1)), flush=True)
