"""What the lab's SPANK plugins do: judge EDFs and pyxis flags, make the container of a step, enter it.

Runs under the system's own Python, with the standard library only.
"""
