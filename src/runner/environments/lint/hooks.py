"""Rules for annotations, which configure the hooks of the Container Engine.

Source: CSCS documentation, container-engine/resource-hook.md and software/alps-extended-images.md (2026-08-20).
"""

import re
from collections.abc import Iterator

from runner.environments.lint.finding import Finding, Subject
from runner.environments.lint.problems import known_problems
from runner.environments.lint.variables import SWITCHED_OFF, brings_plugin
from runner.environments.rewriting import Set
from runner.errors import nearest
from runner.expansion import names

VARIANTS = ("cuda12", "cuda13", "cuda-dl", "rocm5", "rocm6")
_SWITCH = ("true", "false")
_HOOK = "com.hooks."
# annotation -> its valid values; empty: any
KNOWN: dict[str, tuple[str, ...]] = {
    "com.hooks.cxi.enabled": _SWITCH,
    "com.hooks.aws_ofi_nccl.enabled": _SWITCH,
    "com.hooks.aws_ofi_nccl.variant": VARIANTS,
    "com.hooks.netstack.source": ("host", "artifact"),
    "com.hooks.netstack.version": (),
    "com.hooks.netstack.name": (),
    "com.hooks.ssh.enabled": _SWITCH,
    "com.hooks.ssh.authorize_ssh_key": (),
    "com.hooks.ssh.port": (),
    "com.hooks.nvidia_cuda_mps.enabled": _SWITCH,
    "com.hooks.dcgm.enabled": _SWITCH,
    "com.hooks.slurm.enabled": _SWITCH,
    "com.pyxis.pytorch_remap_vars": _SWITCH,
    "com.pyxis.entrypoint_log": _SWITCH,
}


def names_and_values(subject: Subject) -> Iterator[Finding]:
    """Unknown annotations and values: a hook silently ignores names that it does not know."""
    for name, value in subject.own.annotations.items():
        field = f"annotations.{name}"
        if name not in KNOWN:
            if (
                name.startswith(("com.hooks.", "com.pyxis.", "com.hook."))
                or name.partition(".")[0] == "hooks"
            ):
                close = nearest(name, KNOWN, 0.7)
                fix = f"did you mean {close!r}?" if close else ""
                yield subject.say("annotation-unknown", field, f"no hook reads {name}", fix)
        elif KNOWN[name] and value not in KNOWN[name] and "${" not in value:
            reason = f"{name} is {value!r}, but the hook accepts only {', '.join(KNOWN[name])}"
            lower = value.lower()
            changes = (
                (Set(("annotations", *name.split(".")), lower),) if lower in KNOWN[name] else ()
            )
            close = nearest(lower, KNOWN[name], 0.6)
            fix = f'write "{close}"' if close else f"use one of: {', '.join(KNOWN[name])}"
            yield subject.say("annotation-value", field, reason, fix, changes=changes)


def variant(subject: Subject) -> Iterator[Finding]:
    """The variant of the plugin must match the image's major version of CUDA."""
    value = subject.annotation("aws_ofi_nccl.variant")
    if subject.annotation("aws_ofi_nccl.enabled") != "true" or value not in VARIANTS:
        return
    field, image = f"annotations.{_HOOK}aws_ofi_nccl.variant", subject.image
    fits = _fitting(subject)
    if subject.netstack == "artifact":
        stated = subject.annotation("netstack.source")
        if stated or (fits and value not in fits):
            where = "netstack.source is 'artifact'" + (
                "" if stated else f", the default of {subject.setting.site.name}"
            )
            yield subject.say(
                "hook-variant-ignored", field, f"the variant {value!r} has no effect: {where}"
            )
        return
    rocm = f"is for ROCm {image.rocm_version or ''}".rstrip()
    if image.rocm and not fits:
        reason = f"the image {rocm}, for which aws_ofi_nccl has no variant"
        yield subject.say("hook-variant", field, reason, "use an image with ROCm 6", "warning")
    elif fits and value not in fits:
        what = rocm if image.rocm else f"has CUDA {image.cuda}"
        release = f" (NVIDIA's release {image.ngc[0]}.{image.ngc[1]:02})" if image.ngc else ""
        changes = (Set(("annotations", "com", "hooks", "aws_ofi_nccl", "variant"), fits[0]),)
        reason = f"the variant of aws_ofi_nccl is {value}, but the image {what}{release}"
        yield subject.say(
            "hook-variant",
            field,
            reason,
            f'com.hooks.aws_ofi_nccl.variant = "{fits[0]}"',
            changes=changes,
        )


def _fitting(subject: Subject) -> tuple[str, ...]:
    """The variants that fit the image, the best first; empty if there is none, or the image's CUDA is unknown.

    Each variant for ROCm is linked to one version. Source: container-engine/resource-hook.md (2026-08-20).
    """
    image = subject.image
    if image.rocm:
        known = ("rocm6", "rocm5")
        if image.rocm_version is None:
            return known
        return tuple(name for name in known if name == f"rocm{image.rocm_version}")
    if image.cuda not in {12, 13}:
        return ()
    # the plugin for NVIDIA's deep learning images: from release 25 on
    dl = ("cuda-dl",) if image.ngc is None or image.ngc >= (25, 1) else ()
    return (f"cuda{image.cuda}", *dl)


def conflict(subject: Subject) -> Iterator[Finding]:
    """Conflicting annotations: aws_ofi_nccl enables cxi."""
    if (
        subject.annotation("aws_ofi_nccl.enabled") == "true"
        and subject.annotation("cxi.enabled") == "false"
    ):
        if subject.image.extended:
            return  # reported by the rules for extended images
        reason = "the aws_ofi_nccl hook is on and needs the cxi hook, but the cxi hook is off"
        yield subject.say("hook-conflict", f"annotations.{_HOOK}cxi.enabled", reason)


def needs_writable(subject: Subject) -> Iterator[Finding]:
    """A read-only root file system, to which both hooks must write."""
    for hook in ("ssh", "nvidia_cuda_mps"):
        if subject.annotation(f"{hook}.enabled") == "true" and not subject.own.writable:
            reason = (
                f"the {hook} hook writes into the container, whose root file system is read-only"
            )
            yield subject.say(
                "hook-needs-writable", "writable", reason, changes=(Set(("writable",), True),)
            )


def ssh_key(subject: Subject) -> Iterator[Finding]:
    """The hook needs the path of the key file, not the key itself, and no `~`."""
    name = f"{_HOOK}ssh.authorize_ssh_key"
    value = subject.own.annotations.get(name)
    if value is None:
        return
    field = f"annotations.{name}"
    if value.startswith(("ssh-", "ecdsa-", "sk-")):
        yield subject.say(
            "ssh-key", field, "authorize_ssh_key is a key, but must be the path of the key's file"
        )
    elif not value.startswith("/") and not names(value, field):
        yield subject.say(
            "ssh-key",
            field,
            f"{value!r} is not an absolute path",
            "write ${HOME}/.ssh/id_ed25519.pub",
        )
    elif value.endswith(("id_rsa", "id_ed25519", "id_ecdsa")):
        yield subject.say("ssh-key", field, f"{value!r} is the private key", f"write {value}.pub")


def rank_remap(subject: Subject) -> Iterator[Finding]:
    """The rank remap, which torchrun does not need. Source: container-engine/run.md: it is off by default."""
    name = "com.pyxis.pytorch_remap_vars"
    if subject.own.annotations.get(name) == "true" and subject.setting.site.launcher == "torchrun":
        reason = "pyxis sets RANK and LOCAL_RANK for each task, but torchrun, the launcher, must set them"
        yield subject.say("rank-remap", f"annotations.{name}", reason)


def extended_image(subject: Subject) -> Iterator[Finding]:
    """An Alps extended image has its own network stack, whose variables its entrypoint sets."""
    if not subject.image.extended:
        return
    hook = f"annotations.{_HOOK}aws_ofi_nccl.enabled"
    if subject.annotation("aws_ofi_nccl.enabled") == "true":
        reason = (
            "an Alps extended image has its own NCCL plugin, which the aws_ofi_nccl hook replaces"
        )
        changes = (Set(("annotations", "com", "hooks", "aws_ofi_nccl", "enabled"), "false"),)
        yield subject.say("extended-image-hook", hook, reason, changes=changes)
    if not subject.own.entrypoint:
        reason = "the image's entrypoint reads /opt/alps/env, but the entrypoint runs only with `entrypoint = true`"
        yield subject.say(
            "extended-image-entrypoint", "entrypoint", reason, changes=(Set(("entrypoint",), True),)
        )
    if subject.annotation("cxi.enabled") != "false":
        reason = (
            "the cxi hook, which is on by default, replaces the image's libraries with the host's"
        )
        changes = (Set(("annotations", "com", "hooks", "cxi", "enabled"), "false"),)
        yield subject.say(
            "extended-image-cxi", f"annotations.{_HOOK}cxi.enabled", reason, changes=changes
        )
    if subject.environment.env.get("PMIX_MCA_psec") != "native":
        reason = 'MPI of this image starts only with PMIX_MCA_psec = "native"'
        changes = (Set(("env", "PMIX_MCA_psec"), "native"),)
        yield subject.say("extended-image-pmix", "env.PMIX_MCA_psec", reason, changes=changes)


_TUNING = re.compile(r"(NCCL|FI|OFI_NCCL)_[A-Z0-9_]+")
# these do not conflict with anything that the hook sets
_HARMLESS_TUNING = {
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_DEBUG_FILE",
    "FI_LOG_LEVEL",
    "FI_LOG_PROV",
    "FI_EFA_USE_HUGE_PAGE",
}


def stale_tuning(subject: Subject) -> Iterator[Finding]:
    """Entries of [env] that override values of the hook, even if a newer hook sets better values.

    Source: CSCS documentation, clusters/daint.md: CE v26.06.1 sets NCCL_* and FI_* itself (2026-08-20).
    """
    if subject.image.extended or brings_plugin(subject):
        return
    by_file: dict[str, list[str]] = {}
    for name, value in subject.own.env.items():
        known = name in _HARMLESS_TUNING or value.lower() in SWITCHED_OFF.get(name, ())
        if _TUNING.fullmatch(name) and value and not known:
            place = subject.place(f"env.{name}")
            by_file.setdefault(str(place.path) if place else "", []).append(name)
    for names_there in by_file.values():
        verb = "overrides" if len(names_there) == 1 else "override"
        reason = f"{', '.join(names_there)} {verb} the settings of the network hook"
        yield subject.say("stale-tuning", f"env.{names_there[0]}", reason)


RULES = (
    names_and_values,
    variant,
    conflict,
    needs_writable,
    ssh_key,
    rank_remap,
    extended_image,
    stale_tuning,
    known_problems,
)
