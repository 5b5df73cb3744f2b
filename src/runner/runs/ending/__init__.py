"""What ends runs, and what takes away their folders, their code and their images."""
