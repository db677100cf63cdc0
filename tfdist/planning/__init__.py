"""What a training needs before it runs: memory, messages, time, and on what devices it pays."""
