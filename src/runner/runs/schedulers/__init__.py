"""Schedulers: pure pairs of argv builder and output parser, and the one template of the batch script."""
