"""What `runner build` is made of: base, Containerfile, content hash, what the host offers."""
