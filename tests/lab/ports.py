"""Free ports of 127.0.0.1."""

import random
import socket

from tests.lab.processes import LabError

# Below the ephemeral ports (32768 up), so that no outgoing connection can take one between choice and use.
PORTS = range(20000, 32000)


def free_ports(count: int) -> list[int]:
    """`count` TCP ports of 127.0.0.1 that nobody listens on now."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise LabError(f"no {count} free ports in {PORTS}")
