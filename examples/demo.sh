#!/usr/bin/env bash
# What `make demo` runs: from raw images to a verified, distributed fit. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
tfdist() { echo; echo "\$ tfdist $*"; "${VENV:-.venv}"/bin/tfdist "$@"; }

rm -rf data/digits
tfdist shard digits data/digits --num-shards 4
tfdist inspect data/digits --check
tfdist verify --model examples/digits.py:model_fn --data data/digits --strategy horovod --workers 2
tfdist train --model examples/digits.py:model_fn --data data/digits --strategy horovod --workers 2 \
    --epochs 5 --global-batch-size 64 --output runs/digits --overwrite

accuracy=$("${VENV:-.venv}"/bin/python -c "import json; print(round(json.load(open('runs/digits/metrics.json'))['validation']['accuracy'], 4))")
"${VENV:-.venv}"/bin/python -c "import sys; sys.exit(0 if $accuracy >= 0.95 else 'demo: validation accuracy $accuracy is below 0.95')"
echo
echo "demo: validation accuracy $accuracy on 2 Horovod ranks; the curve is runs/digits/curves.png"
