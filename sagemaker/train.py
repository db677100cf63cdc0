"""What SageMaker's training toolkit runs on every rank. See tfdist/aws/job.py."""

import os
from pathlib import Path

from tfdist.aws import entry, job

if __name__ == "__main__":
    entry.run(
        lambda arguments: job.train(arguments, code_folder=Path(__file__).parent),
        output_dir=Path(os.environ["SM_OUTPUT_DIR"]) if "SM_OUTPUT_DIR" in os.environ else None,
    )
