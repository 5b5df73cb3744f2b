"""Figures of the import: `./nox -s bench -- import`."""
