"""Sarus Suite: `srun --edf=FILE`, on podman. Its EDF is stricter, and `$NAME` without braces is a variable.

srun expands every text except the image, with the host's variables only; the node then parses the mounts again, without
expanding variables.
Source: sarus-suite/raster@20f75bd src/lib.rs, src/common.rs and schema; sarus-suite/skybox@e8bd547 src/edf.rs; Sarus
Suite user guide (docs of CSCS, 2026-08-20).
"""

from collections.abc import Mapping
from dataclasses import replace

from runner.environments.engines.ce import COMMENT
from runner.environments.engines.engine import Engine
from runner.environments.engines.shared import (
    EDF_FILE,
    MOUNT_OPTIONS,
    MountSyntax,
    has_variables,
    inside_words,
    map_texts,
    refuse,
    slashed,
    texts,
)
from runner.environments.environment import Attachment, Environment, emit_edf
from runner.errors import RunnerError
from runner.expansion import names, parts, sarus_text
from runner.images.sarus_store import name_in, read_record, reference_of
from runner.site import Origin, Site

_FORBIDDEN = ("$(", "`", ";", '"')  # it expands text with a restricted bash
CXI = "com.hooks.cxi.enabled"
# prefix of annotations -> why they do nothing. Source: Sarus Suite user guide (2026-08-20), "Hooks and annotations"
WITHOUT_EFFECT = {
    "com.hooks.aws_ofi_nccl.variant": "Sarus Suite's plugin fits every CUDA",
    "com.hooks.netstack.": "Sarus Suite uses a fixed network stack artifact",
    "com.pyxis.": "Sarus Suite does not use pyxis",
}


def check(environment: Environment) -> None:
    """Raise RunnerError for anything that its EDF cannot express."""
    if environment.is_squashfs or environment.image.endswith((".sqsh", ".squashfs")):
        why = "Sarus Suite runs images from its own store, not squashfs files"
        fix = (
            "set `image` to REGISTRY/IMAGE:TAG, or to ${RUNNER_IMAGES}/NAME.sqsh, which `runner import` puts into the "
            "store under that name"
        )
        raise refuse(environment, "image", "sarus", why, fix)
    slashed(environment, "sarus")
    if names(environment.image):
        why = f"Sarus Suite does not expand variables in an image: {environment.image!r}"
        raise refuse(
            environment, "image", "sarus", why, "set `image` to the full name, without variables"
        )
    for index, mount in enumerate(environment.mounts):
        field = f"mounts.{index}"
        if any(isinstance(part, str) and "$" in part for part in parts(mount.text(), field)):
            why = f"Sarus Suite expands a mount twice, so a mount cannot contain a plain `$`: {mount.text()!r}"
            fix = "make a symlink at a path without `$`, and mount the symlink"
            raise refuse(environment, field, "sarus", why, fix)
        if "sqsh" in mount.flags:
            fix = "unpack it (unsquashfs -d FOLDER FILE) and mount the folder, or use the ce engine"
            raise refuse(
                environment, field, "sarus", "Sarus Suite cannot mount squashfs files", fix
            )
        if ":" in mount.source + mount.target:
            why = "Sarus Suite splits a mount at every colon before it expands variables"
            fix = "mount a symlink whose path has no colon, or choose another target"
            raise refuse(environment, field, "sarus", why, fix)
    if environment.annotations.get("com.hooks.ssh.enabled") == "true":
        field = "annotations.com.hooks.ssh.enabled"
        why = "Sarus Suite has no SSH into containers yet"
        fix = "remove it; for a shell in a running job: runner shell RUN"
        raise refuse(environment, field, "sarus", why, fix)
    for field, text in texts(environment):
        for word in _FORBIDDEN:
            if word in text and field != "image":
                why = f"Sarus Suite does not accept {word} in a value: {text!r}"
                raise refuse(
                    environment,
                    field,
                    "sarus",
                    why,
                    "export the variable in `task_prolog` of the job file"
                    if field.startswith("env.")
                    else f"use a path or a value without {word}, for example a symlink",
                )


def in_store(
    environment: Environment, site: Site, environ: Mapping[str, str]
) -> tuple[Environment, tuple[str, ...]]:
    """(environment whose image `${RUNNER_IMAGES}/NAME.sqsh` is the reference in the store, notes)."""
    try:
        images = site.images(environ)
    except RunnerError:  # the folder is known only on the site
        images = None
    reference = reference_of(environment.image, images)
    if not reference:
        return environment, ()
    lost = images is None or read_record(images, reference) is None
    name = name_in(environment.image, images)
    known = "it is not known here whether" if images is None else "runner has not put"
    there = "is in Sarus Suite's store" if images is None else "into Sarus Suite's store"
    how = f"runner import {name}, or for an image of a registry: runner import docker://…"
    notes = (f"{known} {name} {there} (to do it: {how})",) if lost else ()
    return replace(environment, image=reference), notes


def attach(environment: Environment, site: Site) -> Attachment:
    """The emitted EDF (mount flags separated by commas, registry and image by a slash), the flag that names it, and
    words that set in the container what srun would otherwise expand with the host's variables.

    An empty value there keeps out the image's variable, but not the host's.
    Source: sarus-suite/skybox@e8bd547 src/container.rs.
    """
    check(environment)
    env, workdir = environment.env, environment.workdir
    referred = {name for text in (*env.values(), workdir or "") for name in names(text)}
    inside = {
        name: text
        for name, text in env.items()
        if not text or has_variables(text) or name in referred
    }
    if inside and "PATH" in env:  # the words that set them must be found with the image's PATH
        inside["PATH"] = env["PATH"]
    entered = workdir if workdir and has_variables(workdir) else None
    rest = {name: text for name, text in env.items() if name not in inside}
    own = replace(environment, env=rest, workdir=None if entered else workdir)
    text = edf(own, COMMENT.replace("--environment", "--edf"))
    return Attachment(
        files={EDF_FILE: text},
        flags=(f"--edf=${{RUNNER_RUN}}/{EDF_FILE}",),
        prefix=inside_words(inside, entered),
        notes=tuple(f"{name} has no effect: {why}" for name, why in without_effect(environment)),
    )


def without_effect(environment: Environment) -> list[tuple[str, str]]:
    """(annotation, why Sarus Suite ignores it)."""
    found = ((name, _reason(name)) for name in environment.annotations)
    return [(name, why) for name, why in found if why]


def _reason(annotation: str) -> str:
    return next(
        (why for prefix, why in WITHOUT_EFFECT.items() if annotation.startswith(prefix)), ""
    )


def lacks_cxi(environment: Environment) -> bool:
    """Whether the environment uses Slingshot through aws_ofi_nccl and does not say whether the hook cxi is on."""
    annotations = environment.annotations
    return annotations.get("com.hooks.aws_ofi_nccl.enabled") == "true" and CXI not in annotations


def edf(environment: Environment, comment: str, *, sources: str | None = None) -> str:
    """The text of its EDF; `sources` as for `emit_edf`. The hook cxi is on where the environment needs it."""
    if lacks_cxi(environment):
        origin = Origin("aws_ofi_nccl needs it, and Sarus Suite does not turn it on")
        annotations = {**environment.annotations, CXI: "true"}
        origins = {**environment.origins, f"annotations.{CXI}": origin}
        environment = replace(environment, annotations=annotations, origins=origins)
    own = replace(map_texts(environment, sarus_text), image=slashed(environment, "sarus"))
    return emit_edf(own, comment, flag_separator=",", sources=sources)


ENGINE = Engine(
    name="sarus",
    attach=attach,
    comment=COMMENT,
    # Source: sarus-suite/raster@20f75bd; podman-run(1), --volume
    mounts=MountSyntax(
        separators=":\n",
        flags=MOUNT_OPTIONS | {"z", "Z", "U", "O"},
        join=",",
        needs_target=True,
        accepts_relative_target=True,
        splits_before_expanding=True,
    ),
    resolved_fields=("mounts",),
    srun_option="edf",
    reads_edf=True,
    write_edf=edf,
    reads_edf_leniently=True,
    expands_bare_variables=True,
    checks_edf=True,
    run_edf=("sarusctl", "run"),
    image_in_store=in_store,
    pulls_with="podman",
    accepts_hash=False,
    usage="srun --edf=./FILE.toml COMMAND   (in a batch script too: on srun's line, not on #SBATCH)",
)
