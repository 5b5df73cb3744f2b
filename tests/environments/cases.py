"""Environments that try each promise of docs/environment.md, and who has to refuse which."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from runner.environments.environment import quoted
from runner.expansion import literal
from tests.environments.corpus import CORPUS

# variables of the caller; the names that are looked at inside
HOST = {
    "ONLY_HOST": "host",
    "HOST_OR_IMAGE": "host",
    "GREETING": "host",
    "EMPTY_HOST": "",
    "LINES": "first\nsecond=2\n",
    "QUOTES": 'it\'s "so" $HOME `id` \\ 🦙',
    "MASTER_ADDR": "nid001",
    "MASTER_PORT": "61234",
    "RUNNER_ATTEMPT": "3",
    "HF_TOKEN": "hf_not_a_real_one",
    "WANDB_API_KEY": "=key=",
    "SLURM_NTASKS_PER_NODE": "1",
    "LC_ALL": "C",
    "LANG": "C",
    "LANGUAGE": "xx",
    "LD_LIBRARY_PATH": "/nowhere",
}
NAMES = tuple(HOST)
ARGUMENTS = ("", "two words", "it's", "$HOME", "${HOME}", "*", "a\nb\r\n", "--", "-x", "\\", '"', "é🦙")
STDIN = "first\nsecond without an end"

# An empty value unsets; the text "${" that is never closed is refused by the Container Engine: see test_engines.py.
VALUES = tuple(text for text in CORPUS if text not in {"", "${"})
# names that mean something to bash, to srun, to an engine, to the loader, or to our own scripts
SPECIAL = {
    "HOME": "/srv/here", "USER": "somebody", "SHELL": "/bin/none", "TMPDIR": "/srv/tmp", "ENV": "/none",
    "BASH_ENV": "/none", "CDPATH": "/none", "GLOBIGNORE": "*", "POSIXLY_CORRECT": "1", "PS4": "$(id)", "TZ": "UTC",
    "SLURM_NTASKS": "99", "ENROOT_SQUASH_OPTIONS": "-x", "PYXIS_CONTAINER_IMAGE": "/none", "DOCKER_HOST": "none",
    "APPTAINER_BIND": "/none", "CONTAINER_HOST": "none", "XDG_RUNTIME_DIR": "/none", "RUNNER_RUN": "/none",
    "LC_CTYPE": "C", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "LANGUAGE": "en", "LD_LIBRARY_PATH": "/own",
    "PATH": "/own:${PATH}", "RANK": "5", "HOSTNAME": "other", "TERM": "dumb", "UID": "77", "lower": "case",
    "http_proxy": "http://none.invalid", "NVIDIA_VISIBLE_DEVICES": "void", "PS1": "x", "MAIL": "/none", "EUID": "5",
    "RANDOM": "5", "HISTFILE": "/x", "FUNCNAME": "x", "SHELLOPTS": "x", "BASHOPTS": "x", "OPTARG": "x", "SECONDS": "5",
    "PROMPT_COMMAND": "x", "GROUPS": "x", "DIRSTACK": "x", "MACHTYPE": "x", "COLUMNS": "x", "PIPESTATUS": "5",
    "REPLY": "r", "env": "e", "image": "i", "engine": "e", "inside": "x", "name": "n", "mounts": "m", "node": "n",
    "root": "r", "base": "b", "command": "c", "host": "h", "final": "f", "flags": "F", "within": "w", "values": "v",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One environment."""

    edf: str
    """without its image; `{here}` is the folder of the caller, which has data/, more/ and file in it"""
    refused: Mapping[str, str] = field(default_factory=dict)
    """engine -> the field that it cannot express"""
    stopped: tuple[str, ...] = ()
    """engines that see only on the node that they cannot, and say so"""
    site_env: Mapping[str, str] = field(default_factory=dict)
    site_mounts: tuple[str, ...] = ()


def _env(values: Mapping[str, str]) -> str:
    text = "[env]\n" + "".join(f"{name} = {quoted(value)}\n" for name, value in values.items())
    return text.replace("{", "{{").replace("}", "}}")


MOUNTS = 'mounts = ["{here}/data:/data:ro", "${{WHERE}}/more:/deep/er/more", "{here}/file:/etc/one", "./more:/kept"]\n'
NO_ENTRYPOINT = {"apptainer": "entrypoint", "host": "entrypoint"}
NO_SQSH = {engine: "mounts.0" for engine in ("sarus", "pyxis", "enroot", "podman", "docker", "apptainer")}
NO_BLANK = {engine: "mounts.0" for engine in ("pyxis", "enroot")}
NO_COMMA = {engine: "mounts.0" for engine in ("pyxis", "enroot", "podman", "docker", "apptainer")}
NO_COLON = {engine: "mounts.0" for engine in ("ce", "sarus", "pyxis", "enroot", "apptainer")}
OF_SHELLS = {
    engine: "env." for engine in ("ce", "sarus", "pyxis", "enroot", "podman", "docker", "apptainer", "sandbox")
}
SHELL_SIGNS = {"sarus": "env.V1"}

CASES = {
    "nothing is set": Case(""),
    "EDF over image over host": Case(
        '[env]\nHOST_OR_IMAGE = "edf"\nONLY_HOST = "edf too"\nNEW = "x"\n', site_env={"NEW": "site", "SITE": "s"}
    ),
    "an empty value unsets what image, host or site have": Case(
        '[env]\nGREETING = ""\nONLY_HOST = ""\nHF_TOKEN = ""\nSITE = ""\nNEVER = ""\n', site_env={"SITE": "s"}
    ),
    "references": Case(
        '[env]\nA = "<${{GREETING}}|${{ONLY_HOST}}|${{MASTER_PORT}}>"\nPATH = "/own/bin:${{PATH}}"\n'
        'B = "${{NEVER:-default of its own}}"\nC = "${{HOST_OR_IMAGE:-never}}"\nD = "$ONLY_HOST $${{ONLY_HOST}} $"\n'
        'HOST_OR_IMAGE = "no entry sees ${{HOST_OR_IMAGE}} of another"\nE = "${{EMPTY_HOST:-was empty}}"\n'
        'F = "${{LINES}}${{QUOTES}}"\n'
    ),
    "any text": Case(_env({f"V{index}": literal(text) for index, text in enumerate(VALUES)}), refused=SHELL_SIGNS),
    "names that mean something elsewhere": Case(_env(SPECIAL), refused={"sarus": "env.PS4"}),
    "a name that shells have for themselves": Case('[env]\nIFS = ":"\n', refused=OF_SHELLS),
    "a name that shells drop": Case('[env]\n"a.b" = "x"\n', refused=OF_SHELLS),
    "entries that others refer to": Case(
        '[env]\nHOST_OR_IMAGE = "edf"\nONLY_HOST = "edf"\nA = "${{HOST_OR_IMAGE}} ${{ONLY_HOST}}"\n'
        'B = "a carriage\\rreturn"\nPATH = "/none"\n'
    ),
    "PATH is unset": Case('[env]\nPATH = ""\n', refused=OF_SHELLS),
    "a working directory": Case('workdir = "/tmp"\n'),
    "a working directory that the image names": Case('workdir = "${{HERE}}"\n'),
    "a working directory whose variable [env] changes": Case('workdir = "${{HERE}}"\n[env]\nHERE = "/none"\n'),
    "mounts": Case(MOUNTS, refused={"host": "mounts.0"}),
    "a mount in a mount, and the site's below": Case(
        'mounts = ["{here}/data:/outer", "{here}/more:/outer/inner:ro"]\n',
        site_mounts=("{here}/site", "/opt:/outer"),
    ),
    "a blank in a path": Case('mounts = ["{here}/a b:/c d"]\n', refused=NO_BLANK),
    "a comma in a path": Case('mounts = ["{here}/a,b:/c"]\n', refused=NO_COMMA),
    "a colon in a path": Case(
        'mounts = ["${{COLON:-{here}/a:b}}:/c"]\n', refused=NO_COLON, stopped=("podman", "docker")
    ),
    "signs of a shell in a path": Case(
        'mounts = ["{here}/it\'s $x;`y` #\\\\z:/q\'$x"]\n', refused={**NO_BLANK, "sarus": "mounts.0"}
    ),
    "a squashfs file": Case('mounts = ["{image}:/content:sqsh"]\n', refused=NO_SQSH),
    "read-only": Case("writable = false\n"),
    "read-only, with mounts and a working directory": Case(f'writable = false\nworkdir = "/data"\n{MOUNTS}'),
    "the entrypoint": Case("entrypoint = true\n", refused=NO_ENTRYPOINT),
    "all at once": Case(
        f'entrypoint = true\nwritable = false\nworkdir = "${{{{HERE}}}}"\n{MOUNTS}'
        '[env]\nPATH = "/own:${{PATH}}"\nONLY_HOST = ""\nA = "${{GREETING}}"\nLC_ALL = "C.UTF-8"\n',
        refused=NO_ENTRYPOINT,
    ),
}  # fmt: skip
