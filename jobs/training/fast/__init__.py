"""The same loss with less work: the head's loss in pieces, batches without padding, attention by document."""
