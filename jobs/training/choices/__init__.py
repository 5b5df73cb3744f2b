"""What a training chose, and why: no slow path is taken in silence."""
