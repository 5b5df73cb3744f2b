"""What runs are doing and have done, from their folders and one question to the scheduler."""
