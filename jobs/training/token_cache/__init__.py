"""Text as token ids in one memory-mapped file: made once, shared by ranks and restarts."""
