"""Why a run failed, waits or is slow: causes as data (causes/*.toml), and the matcher that reads logs."""
