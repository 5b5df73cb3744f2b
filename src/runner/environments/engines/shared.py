"""Code for several engines: errors, mounts, the text of an Attachment, and variables to set in the container."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from runner.environments.edf import Mount
from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.expansion import Variable, expand, join, literal, names, parts


class Inexpressible(RunnerError):
    """A field of an environment that an engine cannot express."""

    def __init__(self, field: str, message: str, why: str, fix: str, place: str = "") -> None:
        super().__init__(f"{place}: {message}" if place else message, why, fix)
        self.field = field
        """the field, as in `env show`: `image`, `mounts.0`, `env.NAME`"""
        self.message = message
        """the error, without the line of the file"""


def refuse(environment: Environment, field: str, engine: str, why: str, fix: str) -> Inexpressible:
    """The error for a field that an engine cannot express. No field is silently dropped."""
    origin = environment.origins.get(field) or environment.origins.get(f"{field}.0")
    place = str(origin.place) if origin and origin.place else ""
    return Inexpressible(
        field, f"the engine {engine!r} cannot use the value of {field}", why, fix, place
    )


EDF_FILE = "environment.toml"
"""the name of the emitted EDF in the run folder"""

MOUNT_OPTIONS = frozenset(
    {"ro", "rw", "bind", "rbind", "private", "rprivate", "slave", "rslave", "shared", "rshared"}
    | {"nosuid", "suid", "nodev", "dev", "noexec", "exec", "sync"}
)
_CHARACTERS = {
    ",": "a comma",
    ":": "a colon",
    "\n": "a newline",
    " ": "a space",
    "\t": "a tab",
    "\\": "a backslash",
}


@dataclass(frozen=True, kw_only=True)
class MountSyntax:
    """The mount syntax of an engine."""

    separators: str = ""
    """characters that a path cannot contain, because they separate the fields and cannot be escaped"""
    flags: frozenset[str] = MOUNT_OPTIONS
    join: str = "+"
    """the separator of flags in an EDF for this engine"""
    checks_flags: bool = True
    """whether an unknown flag is an error; if not, the engine passes flags on unchanged"""
    needs_target: bool = False
    """whether SOURCE alone is an error"""
    accepts_relative_target: bool = False
    splits_before_expanding: bool = False
    """whether separators inside `${VAR:-default}` count"""

    def bad_character(self, text: str) -> str:
        """The name of the first character that these mounts cannot contain; empty if there is none."""
        bad = next((character for character in self.separators if character in text), "")
        return _CHARACTERS.get(bad, bad)


SEPARATOR_FIXES = (
    "rename it, or mount a symlink to it: ln -s SOURCE LINK",
    "choose another target",
)
"""what to do about a character that a mount cannot contain: in its source, and in its target alone"""


def check_mounts(environment: Environment, engine: str, syntax: MountSyntax) -> None:
    """Raise RunnerError for a path that the engine cannot mount, and for an unknown flag."""
    for index, mount in enumerate(environment.mounts):
        for path, fix in zip((mount.source, mount.target), SEPARATOR_FIXES, strict=True):
            plain_text = "".join(part for part in parts(path) if isinstance(part, str))
            bad = syntax.bad_character(plain_text)
            if bad:
                why = f"{path!r} contains {bad}, which a mount of this engine cannot contain"
                raise refuse(environment, f"mounts.{index}", engine, why, fix)
        if "sqsh" in mount.flags and "sqsh" not in syntax.flags:
            why = "only the Container Engine and the sandbox mount squashfs files"
            fix = "unpack it (unsquashfs -d FOLDER FILE) and mount the folder"
            raise refuse(environment, f"mounts.{index}", engine, why, fix)
        unknown = sorted(set(mount.flags) - syntax.flags)
        if syntax.checks_flags and unknown:
            known = ", ".join(sorted(syntax.flags))
            why = f"the engine {engine} has no mount flag {', '.join(unknown)}; it has {known}"
            fix = "correct or remove the flag"
            if set(unknown) <= MOUNT_OPTIONS:
                fix += ", or use the ce engine"
            raise refuse(environment, f"mounts.{index}", engine, why, fix)


def dialect(text: str, what: str) -> str:
    """Convert EDF text, whose defaults are resolved, to Attachment text: only variables are expanded later."""
    return join(parts(text, what))


def fixed_workdir(environment: Environment) -> str | None:
    """The working directory for an option of the engine; None if `split_env` changes to it, or if there is none."""
    text = environment.workdir
    return None if text is None or has_variables(text) else dialect(text, "workdir")


def slashed(environment: Environment, engine: str) -> str:
    """The image's name as REGISTRY/IMAGE. Raises RunnerError for USER@, a login that only enroot supports."""
    from runner.images.reference import parse_reference

    if environment.is_squashfs:
        return environment.image
    image = parse_reference(environment.image)
    if image.user:
        why = (
            f"{environment.image!r} contains a user name for the login, which only enroot supports"
        )
        login = {"apptainer": "apptainer registry login docker://", "docker": "docker login "}.get(
            engine, "podman login "
        )
        fix = f"log in ({login}{image.registry}) and write the image as {image.with_slash}"
        raise refuse(environment, "image", engine, why, fix)
    return image.with_slash


def has_variables(text: str) -> bool:
    """Whether a text refers to a variable."""
    return any(isinstance(part, Variable) for part in parts(text))


def map_texts(environment: Environment, change: Callable[[str, str], str]) -> Environment:
    """The environment with `change(text, field)` applied to each text that may contain variables."""
    return replace(
        environment,
        image=change(environment.image, "image"),
        workdir=None if environment.workdir is None else change(environment.workdir, "workdir"),
        mounts=tuple(
            Mount(
                change(mount.source, f"mounts.{index}"),
                change(mount.target, f"mounts.{index}"),
                mount.flags,
            )
            for index, mount in enumerate(environment.mounts)
        ),
        env={name: change(value, f"env.{name}") for name, value in environment.env.items()},
        annotations={
            name: change(value, f"annotations.{name}")
            for name, value in environment.annotations.items()
        },
        devices=tuple(
            change(device, f"devices.{index}") for index, device in enumerate(environment.devices)
        ),
    )


def texts(environment: Environment) -> list[tuple[str, str]]:
    """(field, text) of each text in which variables are expanded."""
    found: list[tuple[str, str]] = []

    def note(text: str, field: str) -> str:
        found.append((field, text))
        return text

    map_texts(environment, note)
    return found


def without_defaults(
    environment: Environment, variables: Mapping[str, str], *, only: tuple[str, ...] = ("",)
) -> tuple[Environment, tuple[str, ...]]:
    """The environment with `${VAR:-default}` resolved now, and one note for each.

    A variable that is set stays a variable; one that is unset or empty is replaced by its default. `only`: prefixes of
    the fields to resolve.
    """
    notes: dict[str, None] = {}

    def decide(text: str, field: str) -> str:
        if not field.startswith(only):
            return text
        pieces: list[str | Variable] = []
        for part in parts(text, field):
            if isinstance(part, str) or part.default is None:
                pieces.append(part)
            elif variables.get(part.name):
                pieces.append(Variable(part.name))
                notes[f"{field}: ${{{part.name}:-…}} uses {part.name}, which is set here"] = None
            else:
                try:
                    value = expand(part.default, variables, field)
                except RunnerError as error:
                    raise Inexpressible(field, error.what, error.why, error.fix) from error
                pieces.append(value)
                notes[
                    f"{field}: ${{{part.name}:-…}} becomes {value!r}: {part.name} is not set here"
                ] = None
        return join(tuple(pieces))

    return map_texts(environment, decide), tuple(notes)


# Variables that must not be exported on the host for the container, because they control bash, srun or the dynamic
# loader, or because the engine does not pass them on. Source: pyxis 0.24.0, pyxis_slurmstepd.c, the list of variables
# kept from enroot.
_HOST_ONLY_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SBATCH_",
    "SALLOC_",
    "SPANK_",
    "PMI_",
    "PMIX_",
    "PYXIS_",
    "ENROOT_",
    "LD_",
    "BASH",
    "APPTAINER_",
    "APPTAINERENV_",
    "SINGULARITY_",
    "SINGULARITYENV_",
    "DOCKER_",
    "CONTAINER_",
    "CONTAINERS_",
    "LC_",
    "PODMAN_",
    "RUNNER_",
    "XDG_",
    "HIST",
    "EPOCH",
    "COMP_",
    "COPROC",
    "PROMPT_",
    "MAIL",
    "READLINE_",
)
_HOST_ONLY = {
    "PATH",
    "HOME",
    "IFS",
    "ENV",
    "CDPATH",
    "SHELLOPTS",
    "UID",
    "EUID",
    "PPID",
    "GROUPS",
    "TMPDIR",
    "PWD",
    "OLDPWD",
    "PS0",
    "PS1",
    "PS2",
    "PS3",
    "PS4",
    "SHELL",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "POSIXLY_CORRECT",
    "TMOUT",
    "EXECIGNORE",
    "GLOBIGNORE",
    "OPTIND",
    "OPTERR",
    "OPTARG",
    "RANDOM",
    "SRANDOM",
    "SECONDS",
    "LINENO",
    "FUNCNEST",
    "FUNCNAME",
    "TZ",
    "SCRATCH",
    "DIRSTACK",
    "PIPESTATUS",
    "MACHTYPE",
    "OSTYPE",
    "HOSTTYPE",
    "HOSTNAME",
    "MAPFILE",
    "REPLY",
    "COLUMNS",
    "LINES",
    "_",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables that every POSIX shell sets itself; a shell (enroot's /etc/rc) runs between an engine and the command.
_OF_SHELLS = {"IFS", "PWD", "OLDPWD", "SHLVL", "_", "PPID", "OPTIND", "LINENO"}


def check_names(environment: Environment, engine: str) -> None:
    """Raise RunnerError for a variable that a shell before the command would drop or overwrite."""
    if environment.env.get("PATH") == "":
        why = "PATH is empty, so the shell that starts the command would use its own default PATH"
        raise refuse(
            environment, "env.PATH", engine, why, 'list the folders: PATH = "/usr/bin:/bin"'
        )
    for name in environment.env:
        if name in _OF_SHELLS or not _NAME.fullmatch(name):
            what = f"shells drop variables with names like {name!r}"
            if name in _OF_SHELLS:
                what = f"every shell sets {name} itself"
            why = f"a shell runs before the command, and {what}"
            raise refuse(
                environment, f"env.{name}", engine, why, "set the variable: env NAME=VALUE COMMAND"
            )


def split_env(environment: Environment) -> tuple[dict[str, str], tuple[str, ...]]:
    """(variables to export on the host and pass by name, words that set the others in the container).

    Exported variables are plain text. The words set, in the container: references (which see the image's variables, as
    with the Container Engine) and the variables that they refer to, unset variables, values with line breaks, and names
    that would cause harm on the host. They also resolve a working directory that contains variables.
    """
    exports: dict[str, str] = {}
    inside: dict[str, str] = {}
    texts = (*environment.env.values(), environment.workdir or "")
    # variables that others refer to are set together with them, so that entries do not see each other
    referred = {name for text in texts for name in names(text)}
    for name, value in environment.env.items():
        # enroot reads a file line by line: text after a line break would become another variable
        plain_text = value and not has_variables(value) and "\n" not in value
        if plain_text and name not in referred and _can_be_exported(name):
            exports[name] = value
        else:
            inside[name] = value
    plain = {name: expand(value, {}, f"env.{name}") for name, value in exports.items()}
    reference = environment.workdir is not None and has_variables(environment.workdir)
    workdir = environment.workdir if reference else None
    return {name: literal(value) for name, value in plain.items()}, inside_words(inside, workdir)


def _can_be_exported(name: str) -> bool:
    return (
        name not in _HOST_ONLY
        and not name.startswith(_HOST_ONLY_PREFIXES)
        and _NAME.fullmatch(name) is not None
    )


def inside_words(env: Mapping[str, str], workdir: str | None = None) -> tuple[str, ...]:
    """Words before a command that change to `workdir` and set these variables where the command runs; an empty value
    unsets.

    All references are expanded before any variable is set, as the Container Engine does.
    """
    unset = tuple(word for name, value in env.items() if not value for word in ("-u", name))
    texts = {name: parts(value, f"env.{name}") for name, value in env.items() if value}
    moving = {
        name: value
        for name, value in texts.items()
        if any(isinstance(part, Variable) for part in value)
    }
    fixed = tuple(
        literal(f"{name}={''.join(map(str, value))}")
        for name, value in texts.items()
        if name not in moving
    )
    plain = ("env", *unset, *fixed) if unset or fixed else ()
    if not moving and workdir is None:
        return plain
    enter = ""
    if workdir is not None:
        enter = f'cd -- "{_inner(parts(workdir, "workdir"), "workdir")}" && '
    # exported, because other users can read command lines; what the shell itself reads is not
    exports, words = "", ""
    for name, value in moving.items():
        word = f' {single_quoted(name)}="{_inner(value, "[env]")}"'
        if _can_be_exported(name):
            exports += word
        else:
            words += word
    last = f'set -- env{words} "$@" && ' if words else ""
    export = f"export{exports} && " if exports else ""
    script = f'{enter}{last}{export}exec "$@"'
    return ("sh", "-c", literal(script), "sh", *plain)


def _inner(pieces: tuple[str | Variable, ...], where: str, special: str = '\\"$`') -> str:
    """The pieces, escaped for double quotes of a shell. Inside a default, the closing brace is special too."""
    found = ""
    for piece in pieces:
        if isinstance(piece, str):
            found += re.sub(f"([{re.escape(special)}])", r"\\\1", piece)
        elif piece.default is None:
            found += f"${{{piece.name}?is not defined, and {where} needs it}}"
        else:
            found += f"${{{piece.name}:-{_inner(parts(piece.default, where), where, special=special + '}')}}}"
    return found


def single_quoted(text: str) -> str:
    """The text, quoted for any POSIX shell."""
    return "'" + text.replace("'", "'\\''") + "'"


@lru_cache(maxsize=8)
def script(name: str) -> str:
    """The text of a shell script of this folder."""
    return (Path(__file__).resolve().parent / name).read_text(encoding="utf-8")


def bare_squashfs(environment: Environment) -> bool:
    """Whether the image is a bare file name, which engines treat as the name of an image in a registry."""
    return not environment.is_squashfs and environment.image.endswith((".sqsh", ".squashfs"))


def registry_or_podman(environment: Environment) -> str:
    """The image as `runner import` names it: a name without a registry of its own is that of an image of podman."""
    kind = "podman" if environment.image.startswith("localhost/") else "docker"
    return f"{kind}://{environment.image}"


def refuse_annotations(environment: Environment, engine: str) -> None:
    """Raise RunnerError if annotations enable something, because an engine without these hooks would ignore it.

    `com.hooks.cxi.enabled = "false"` enables nothing.
    """
    wanted = [name for name, value in environment.annotations.items() if value != "false"]
    if wanted:
        first = f"annotations.{wanted[0]}"
        field = first if first in environment.origins else "annotations"
        why = f"only the Container Engine and Sarus Suite read annotations ({', '.join(wanted)})"
        raise refuse(
            environment, field, engine, why, "remove the annotations, or use the engine ce or sarus"
        )
