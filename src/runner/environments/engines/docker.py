"""docker: uses the same script as podman. It runs images from its storage or a registry, but not squashfs files."""

from dataclasses import replace

from runner.environments.engines import podman
from runner.environments.engines.engine import DockerOptions
from runner.environments.engines.shared import refuse
from runner.environments.environment import Attachment, Environment
from runner.site import Site


def attach(environment: Environment, site: Site) -> Attachment:
    """The script, its configuration, and the words that start it."""
    if environment.is_squashfs:
        why = f"docker runs only images from its storage or a registry, but {environment.image!r} is a squashfs file"
        fix = "use the engine podman or sandbox, or set `image` to the name of an image"
        raise refuse(environment, "image", "docker", why, fix)
    return podman.attach(environment, site, "docker")


ENGINE = replace(
    podman.ENGINE,
    name="docker",
    attach=attach,
    docker_options=DockerOptions(gpus=("--gpus", "all"), read_only_tmp=True),
    programs=frozenset({"docker"}),
)
