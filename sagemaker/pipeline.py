"""`tfdist aws pipeline` for the configuration beside: python sagemaker/pipeline.py --dry-run"""

import sys
from pathlib import Path

from tfdist.cli.main import main

if __name__ == "__main__":
    config = Path(__file__).with_name("config.yaml")
    sys.argv[1:] = ["aws", "pipeline", "--config", str(config), *sys.argv[1:]]
    main()
