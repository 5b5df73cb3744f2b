"""What a person looks at: metrics, the progress line, pictures."""
