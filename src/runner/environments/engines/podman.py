"""podman and docker: `run --rm`, through a script that reads the image's variables first."""

from dataclasses import replace

from runner.environments.engines.engine import DockerOptions, Engine
from runner.environments.engines.sandbox import conf
from runner.environments.engines.shared import MountSyntax, bare_squashfs, refuse, script, slashed
from runner.environments.environment import Attachment, Environment
from runner.site import Site


def attach(environment: Environment, site: Site, engine: str = "podman") -> Attachment:
    """The script, its configuration, and the words that start it."""
    if bare_squashfs(environment) or not environment.image:
        why = (
            f"{environment.image!r} is neither the path of a squashfs file nor the name of an image"
        )
        raise refuse(environment, "image", engine, why, "write an absolute path, or NAME:TAG")
    named = replace(environment, image=slashed(environment, engine))
    gpus = "1" if site.gpus_per_node and not environment.devices else ""
    return Attachment(
        files={
            "payload/container.sh": script("container.sh"),
            "payload/environment.sh": script("environment.sh"),
            "payload/container.conf": conf(named, {"engine": engine, "gpus": gpus}),
        },
        prefix=("bash", "${RUNNER_RUN}/payload/container.sh"),
    )


ENGINE = Engine(
    name="podman",
    attach=attach,
    comment="What the container of this run sees; payload/container.conf says the same to payload/container.sh.",
    mounts=MountSyntax(separators=":,", flags=frozenset({"ro", "rw", "rbind", "bind"})),
    pulls_with="podman",
    accepts_hash=False,
    docker_options=DockerOptions(gpus=("--device", "nvidia.com/gpu=all"), read_only_tmp=False),
    programs=frozenset({"podman", "squashfuse", "unsquashfs"}),
)
