"""What a run has printed: one stream per file, merged by time over ranks and attempts, or followed as it comes."""
