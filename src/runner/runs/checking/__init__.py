"""What is looked at before a job is submitted, so that it fails here and not in the queue."""
