"""What the processing step runs: raw data in, shards and their manifest out, a folder a channel."""

from tfdist.aws import entry, sharding

if __name__ == "__main__":
    entry.run(sharding.main, output_dir=None)
