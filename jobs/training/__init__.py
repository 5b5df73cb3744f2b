"""What the job scripts share: run folder, data, batches, checkpoints, metrics. For Python 3.10 and later."""
