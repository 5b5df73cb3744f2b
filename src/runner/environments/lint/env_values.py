"""Rules over [env]: PATH, GPUs, the network."""

from __future__ import annotations

import re
from collections.abc import Iterator

from runner.environments.lint.finding import Finding
from runner.environments.lint.subject import Subject
from runner.environments.rewriting import Set
from runner.expansion import names

_TUNING = re.compile(r"(NCCL|FI|OFI_NCCL)_[A-Z0-9_]+")
# these tune nothing, or nothing that the hook sets
_HARMLESS_TUNING = {
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_DEBUG_FILE",
    "FI_LOG_LEVEL",
    "FI_LOG_PROV",
    "FI_EFA_USE_HUGE_PAGE",
}
_SWITCHED_OFF = {
    "NCCL_NET": {"socket"},
    "NCCL_NET_DISABLE": {"1"},
    "NCCL_IB_DISABLE": {"1"},
    "NCCL_NET_PLUGIN": {"none"},
}


def path_replaced(subject: Subject) -> Iterator[Finding]:
    """What the image put into PATH is lost."""
    for name in ("PATH", "LD_LIBRARY_PATH"):
        value = subject.own.env.get(name)
        if value is None or name in names(value, f"env.{name}"):
            continue
        if name == "PATH" and {"/usr/bin", "/bin"} <= set(value.split(":")):
            continue  # written out whole
        if name == "LD_LIBRARY_PATH" and (not value or not subject.image.nvidia):
            continue
        reason = f"env.{name} replaces the image's, and programs of the image are not found any more"
        changes = (Set(("env", name), f"{value}:${{{name}}}"),) if value else ()
        yield subject.say("path-replaced", f"env.{name}", reason, f'{name} = "{value}:${{{name}}}"', changes=changes)


def gpus_hidden(subject: Subject) -> Iterator[Finding]:
    """Slurm and the engine give each job its GPUs; a value in the file stands against that."""
    env = subject.own.env
    if env.get("NVIDIA_VISIBLE_DEVICES") in {"", "void", "none"} and subject.setting.site.gpus_per_node:
        reason = "the engine brings no GPU into a container whose NVIDIA_VISIBLE_DEVICES is empty or void"
        yield subject.say("gpus-hidden", "env.NVIDIA_VISIBLE_DEVICES", reason, 'NVIDIA_VISIBLE_DEVICES = "all"')
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if env.get(name):
            yield subject.say("gpus-hidden", f"env.{name}", f"every task of the job sees the GPUs {env[name]} alone")


def stale_tuning(subject: Subject) -> Iterator[Finding]:
    """An entry of [env] wins over what the hook sets, and stays when the hook learns better.

    Source: CSCS documentation, clusters/daint.md: CE v26.06.1 sets NCCL_* and FI_* itself (2026-08-20).
    """
    if subject.setting.engine != "ce" or subject.image.extended:
        return
    by_file: dict[str, list[str]] = {}
    for name, value in subject.own.env.items():
        known = name in _HARMLESS_TUNING or value.lower() in _SWITCHED_OFF.get(name, ())
        if _TUNING.fullmatch(name) and value and not known:
            place = subject.place(f"env.{name}")
            by_file.setdefault(str(place.path) if place else "", []).append(name)
    for names_there in by_file.values():
        verb = "overrides" if len(names_there) == 1 else "override"
        reason = f"{', '.join(names_there)} {verb} what the network hook sets for its libraries"
        yield subject.say("stale-tuning", f"env.{names_there[0]}", reason)


def nccl_over_tcp(subject: Subject) -> Iterator[Finding]:
    """Without a plugin for the network NCCL uses sockets, at a tenth of the speed.

    Source: CSCS documentation, container-engine/resource-hook.md (2026-08-20).
    """
    for name, values in _SWITCHED_OFF.items():
        value = subject.own.env.get(name)
        if value is not None and value.lower() in values:
            yield subject.say("nccl-over-tcp", f"env.{name}", f"env.{name} = {value} sends NCCL over TCP", "remove it")
    gpus, image = subject.setting.site.gpus_per_node, subject.image
    if subject.setting.engine != "ce" or not gpus or not subject.own.image or image.extended:
        return
    said = subject.annotation("aws_ofi_nccl.enabled")
    if said != "true" and (image.nvidia or said == "false"):
        field = "annotations.com.hooks.aws_ofi_nccl.enabled"
        reason = "the aws_ofi_nccl hook is not switched on: between nodes NCCL goes over TCP"
        fix = 'com.hooks.aws_ofi_nccl.enabled = "true" and its variant, if jobs use more than one node'
        yield subject.say("nccl-over-tcp", field, reason, fix)


RULES = (path_replaced, gpus_hidden, stale_tuning, nccl_over_tcp)
