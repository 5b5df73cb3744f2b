"""Rules for Sarus Suite: what it does differently from the Container Engine with the same EDF.

Source: Sarus Suite user guide (docs of CSCS, 2026-08-20); sarus-suite/raster@20f75bd, src/lib.rs (defaults, expansion);
sarus-suite/skybox@e8bd547, src/container.rs (variables).
"""

from collections.abc import Iterator

from runner.environments.engines.sarus import CXI, lacks_cxi, without_effect
from runner.environments.engines.shared import has_variables
from runner.environments.environment import DEFAULT
from runner.environments.lint.finding import Finding, Subject
from runner.environments.lint.hooks import conflict, names_and_values
from runner.environments.rewriting import Set, Unset
from runner.errors import RunnerError
from runner.images.sarus_store import name_in, newest


def image(subject: Subject) -> Iterator[Finding]:
    """A path, which Sarus Suite cannot use, or an image that runner has not put into its store."""
    text, setting = subject.own.image, subject.setting
    try:
        images = setting.site.images(setting.environ)
    except RunnerError:
        images = None
    if name := name_in(text, images):
        if setting.here and images is not None and newest(images, name) is None:
            reason = f"runner has not put {name} into Sarus Suite's store"
            fix = f"runner build {name} --import, or for an image of a registry: runner import docker://…"
            yield subject.say("image-missing", "image", reason, fix)
    elif subject.own.is_squashfs or text.endswith((".sqsh", ".squashfs")):
        yield subject.say(
            "image-path",
            "image",
            f"{text!r} is a path, but Sarus Suite runs images from its own store",
        )


def variable_in_image(subject: Subject) -> Iterator[Finding]:
    """Variables in `image`, which raster does not expand. Source: sarus-suite/raster@20f75bd, src/lib.rs."""
    image = subject.own.image
    if "${" in image and not subject.own.is_squashfs:
        yield subject.say("variable-in-image", "image", f"Sarus Suite does not expand {image!r}")


def annotations(subject: Subject) -> Iterator[Finding]:
    """Hooks that are off by default or missing, and annotations without effect."""
    environment = subject.environment
    if lacks_cxi(environment):
        reason = "aws_ofi_nccl does not bring the hook cxi, so NCCL would use TCP; `runner launch` turns it on"
        on = Set(("annotations", *CXI.split(".")), "true")
        yield subject.say("hook-not-default", f"annotations.{CXI}", reason, changes=(on,))
    for name, why in without_effect(environment):
        out, reason = Unset(("annotations", *name.split("."))), f"{name} has no effect: {why}"
        yield subject.say("hook-without-effect", f"annotations.{name}", reason, changes=(out,))
    if subject.annotation("ssh.enabled") == "true":
        reason = "Sarus Suite has no SSH into containers yet"
        yield subject.say("hook-missing", "annotations.com.hooks.ssh.enabled", reason)


def entrypoint(subject: Subject) -> Iterator[Finding]:
    """The default of `entrypoint` is true, unlike with the Container Engine."""
    if subject.own.origins.get("entrypoint") is DEFAULT:
        reason = "without `entrypoint`, plain `srun --edf` runs the image's entrypoint; `runner launch` does not"
        yield subject.say(
            "entrypoint-default", "entrypoint", reason, changes=(Set(("entrypoint",), False),)
        )


def variables(subject: Subject) -> Iterator[Finding]:
    """Entries of [env] that srun expands with the host's variables, or does not unset."""
    for name, value in subject.own.env.items():
        if not value:
            reason = (
                f"plain `srun --edf` keeps the host's value of {name}; `runner launch` unsets it"
            )
        elif has_variables(value):
            reason = f"plain `srun --edf` expands {name} with the host's variables; `runner launch`, in the container"
        else:
            continue
        yield subject.say("env-on-host", f"env.{name}", reason)


RULES = (
    image,
    variable_in_image,
    annotations,
    entrypoint,
    variables,
    names_and_values,
    conflict,
)
