"""What the job scripts share: run folder, data, batches, checkpoints, metrics. Needs Python 3.10; never imports `runner`."""
