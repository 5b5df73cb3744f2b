"""What `runner import` is made of: where the image is, the plan, the one pass, the index, what lies beside the file."""
