"""From a stream of files to one squashfs file."""
