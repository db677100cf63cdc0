"""What the evaluation step runs: model.tar.gz and test shards in, evaluation.json out."""

from tfdist.aws import entry, evaluation

if __name__ == "__main__":
    entry.run(evaluation.main, output_dir=None)
