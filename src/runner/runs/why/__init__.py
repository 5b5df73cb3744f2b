"""Find out why a run failed, waits or is slow: causes as data (causes/*.toml), and code that matches them with logs."""
