"""Rules for variables: defined, in braces, expanded; values in [env]; secrets."""

import re
from collections.abc import Iterator

from runner.environments.engines.shared import texts
from runner.environments.lint.finding import Finding, Subject
from runner.environments.rewriting import Set
from runner.expansion import Variable, names, parts
from runner.machine.secrets import is_placeholder, looks_secret

# defined for users of most clusters; other names get a note when the check does not run on the cluster
_USUAL = {
    "HOME",
    "USER",
    "LOGNAME",
    "PWD",
    "TMPDIR",
    "SCRATCH",
    "STORE",
    "PROJECT",
    "WORK",
    "RUNNER_IMAGES",
}
_BARE = re.compile(r"(?<!\$)\$([A-Za-z_][A-Za-z0-9_]*)")
_LIKELY_IN_IMAGE = {
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "HOME",
    "LIBRARY_PATH",
    "CPATH",
    "CUDA_HOME",
}


def undefined_variable(subject: Subject) -> Iterator[Finding]:
    """Undefined variables, which make the job fail. In [env], the image may define them."""
    variables = subject.setting.variables
    for field, text in texts(subject.environment):
        if "${" not in text:
            continue
        bare = {
            part.name
            for part in parts(text, field)
            if isinstance(part, Variable) and part.default is None
        }
        for name in names(text, field):
            if name not in bare or name in variables or name.startswith("SLURM_"):
                continue
            in_env = field.startswith("env.")
            if in_env and name in _LIKELY_IN_IMAGE:
                continue
            fix = f"export {name}=…, or give it a default: ${{{name}:-…}}"
            if subject.setting.here:
                reason = f"{field} needs {name}, which is not set in this shell"
                reason += "; the image must define it" if in_env else ""
                yield subject.say(
                    "undefined-variable", field, reason, fix, "warning" if in_env else "error"
                )
            elif name not in _USUAL:
                reason = (
                    f"{field} needs {name}, which must be defined on {subject.setting.site.name}"
                )
                yield subject.say("undefined-variable", field, reason, fix, "note")


def without_braces(subject: Subject) -> Iterator[Finding]:
    """`$VAR` without braces, which is plain text for the Container Engine and runner."""
    for field, text in texts(subject.own):
        if "$" not in text:
            continue
        plain = "".join(part for part in parts(text, field) if isinstance(part, str))
        for match in _BARE.finditer(plain):
            severity = "warning" if field.startswith(("env.", "annotations.")) else "error"
            reason = (
                f"{field} contains {match[0]} without braces, which is plain text, not a variable"
            )
            if subject.setting.engine_facts.expands_bare_variables:
                reason = f"{field} contains {match[0]} without braces, which only Sarus Suite reads as a variable"
            # in [env], plain text may be intended, so only the user can fix it
            value = ""
            if severity == "error" and "." not in field:
                value = getattr(subject.own, field, "")
            changes = (Set((field,), _BARE.sub(r"${\1}", value)),) if value else ()
            fix = f"write ${{{match[1]}}}"
            yield subject.say(
                "variable-without-braces", field, reason, fix, severity=severity, changes=changes
            )


def env_refers_to_env(subject: Subject) -> Iterator[Finding]:
    """References between entries of [env]: an entry sees the variables of the host and the image, not other entries.

    Source: CSCS documentation, container-engine/edf.md, "Environment variables" (2026-08-20).
    """
    env = subject.own.env
    for name, value in env.items():
        if "${" not in value:
            continue
        for other in names(value, f"env.{name}"):
            if other != name and env.get(other):
                reason = (
                    f"env.{name} refers to the {other} of the host or the image, not to env.{other}"
                )
                yield subject.say(
                    "env-refers-to-env",
                    f"env.{name}",
                    reason,
                    f"write the value itself: {env[other]!r}",
                )


# usually set only for NCCL
_NCCL_NETWORK = (
    "NCCL_SOCKET_IFNAME",
    "NCCL_CROSS_NIC",
    "NCCL_NET_GDR_LEVEL",
)
# variable -> its values that switch the network plugin of NCCL off
SWITCHED_OFF = {
    "NCCL_NET": {"socket"},
    "NCCL_NET_DISABLE": {"1"},
    "NCCL_IB_DISABLE": {"1"},
    "NCCL_NET_PLUGIN": {"none"},
}


def path_replaced(subject: Subject) -> Iterator[Finding]:
    """A PATH without the image's own folders."""
    for name in ("PATH", "LD_LIBRARY_PATH"):
        value = subject.own.env.get(name)
        if value is None or name in names(value, f"env.{name}"):
            continue
        if name == "PATH" and {"/usr/bin", "/bin"} <= set(value.split(":")):
            continue  # a complete PATH
        if name == "LD_LIBRARY_PATH" and (not value or not subject.image.nvidia):
            continue
        reason = f"env.{name} replaces the image's value, so programs or libraries of the image may not be found"
        changes = (Set(("env", name), f"{value}:${{{name}}}"),) if value else ()
        yield subject.say(
            "path-replaced",
            f"env.{name}",
            reason,
            f'{name} = "{value}:${{{name}}}"',
            changes=changes,
        )


def gpus_hidden(subject: Subject) -> Iterator[Finding]:
    """Values that override the GPUs that Slurm and the engine assign to the job."""
    env = subject.own.env
    if (
        env.get("NVIDIA_VISIBLE_DEVICES") in {"", "void", "none"}
        and subject.setting.site.gpus_per_node
    ):
        reason = "the container has no GPU if NVIDIA_VISIBLE_DEVICES is empty, void or none"
        yield subject.say(
            "gpus-hidden", "env.NVIDIA_VISIBLE_DEVICES", reason, 'NVIDIA_VISIBLE_DEVICES = "all"'
        )
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        every = range(subject.setting.site.gpus_per_node or 0)
        if env.get(name) and env[name] != ",".join(map(str, every)):
            yield subject.say(
                "gpus-hidden", f"env.{name}", f"every task of the job sees only GPUs {env[name]}"
            )


def brings_plugin(subject: Subject) -> bool:
    """Whether NCCL gets a network plugin that is not the hook's: its name is in [env]."""
    plugin = subject.own.env.get("NCCL_NET_PLUGIN", "").lower()
    off = plugin in {"", *SWITCHED_OFF.get("NCCL_NET_PLUGIN", ())}
    return not off and subject.annotation("aws_ofi_nccl.enabled") != "true"


def nccl_over_tcp(subject: Subject) -> Iterator[Finding]:
    """A missing network plugin: NCCL then uses sockets, at a tenth of the speed.

    Source: CSCS documentation, container-engine/resource-hook.md (2026-08-20).
    """
    for name, values in SWITCHED_OFF.items():
        value = subject.own.env.get(name)
        if value is not None and value.lower() in values:
            yield subject.say(
                "nccl-over-tcp",
                f"env.{name}",
                f"{name} = {value} can make NCCL use TCP",
                f"remove {name}",
            )
    gpus, image = subject.setting.site.gpus_per_node, subject.image
    # only engines that read the EDF have the hook
    if not subject.setting.engine_facts.reads_edf or not gpus:
        return
    if not subject.own.image or image.extended or brings_plugin(subject):
        return
    hook = subject.annotation("aws_ofi_nccl.enabled")
    shows_nccl = image.nccl or any(subject.own.env.get(name) for name in _NCCL_NETWORK)
    if hook != "true" and (shows_nccl or hook == "false"):
        field = "annotations.com.hooks.aws_ofi_nccl.enabled"
        reason = "the aws_ofi_nccl hook is off: NCCL uses TCP between nodes, unless the image has its own plugin"
        fix = 'if jobs use more than one node, set com.hooks.aws_ofi_nccl.enabled = "true" and its variant'
        yield subject.say("nccl-over-tcp", field, reason, fix)


def secret_value(subject: Subject) -> Iterator[Finding]:
    """Secrets in plain text. The message does not repeat the secret."""
    for name, value in subject.own.env.items():
        literal = "".join(part for part in parts(value, name) if isinstance(part, str))
        if looks_secret(name, literal) and not is_placeholder(literal):
            field = f"env.{name}"
            fix = f"remove the entry, and export {name} in your shell: the container inherits the host's variables"
            yield subject.say(
                "secret-value", field, f"{field} contains a secret in plain text", fix
            )
    for name, value in subject.own.annotations.items():
        if looks_secret("", value):
            field = f"annotations.{name}"
            reason = f"{field} contains a secret in plain text"
            yield subject.say("secret-value", field, reason, "remove the value from the file")


RULES = (
    undefined_variable,
    without_braces,
    env_refers_to_env,
    path_replaced,
    gpus_hidden,
    nccl_over_tcp,
    secret_value,
)
