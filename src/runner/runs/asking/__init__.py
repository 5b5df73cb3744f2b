"""What a user asks for: a job file and a command line become a Job, every value with where it came from."""
