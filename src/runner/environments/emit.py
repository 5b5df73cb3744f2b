"""The output of `runner env emit`: text for plain srun or a container engine, to use without runner."""

from collections.abc import Mapping
from dataclasses import replace

from runner.environments.engines import attach, decided, sarus, with_site
from runner.environments.engines.shared import (
    has_variables,
    inside_words,
    slashed,
    without_defaults,
)
from runner.environments.environment import Environment, emit_edf
from runner.errors import RunnerError
from runner.expansion import literal
from runner.quoting import live
from runner.site import Site

_USE = {
    "ce": "srun --environment=./FILE.toml COMMAND   (in a batch script too: on srun's line, not on #SBATCH)",
    "sarus": "srun --edf=./FILE.toml COMMAND   (in a batch script too: on srun's line, not on #SBATCH)",
    "pyxis": "bash THIS_FILE COMMAND…, or sbatch OPTIONS… THIS_FILE COMMAND…",
}
# Fills the array `host` with an --env for each host variable to pass on, that is, which the image does not set.
_HOST = """\
host=()
for name in $(compgen -e); do
  case $name in
    PATH | LD_LIBRARY_PATH | LD_PRELOAD | LANG | LANGUAGE | LC_ALL) ;;
    BASH_* | CONTAINERS_* | SHLVL | PWD | OLDPWD | _) ;;
    *) [[ $'\n'$image == *$'\n'"$name="* ]] || host+=(--env "$name") ;;
  esac
done
"""
_INSPECT = "image inspect --format '{{range .Config.Env}}{{println .}}{{end}}'"
_MOUNTED = """\
folder=$(mktemp -d)   # an ordinary user starts this file with `podman unshare bash`
mkdir "$folder/image"
squashfuse {image} "$folder/image"
trap 'fusermount -u "$folder/image"; rm -r "$folder"' EXIT
image=$(cat "$folder/image/etc/environment")
own=()
while IFS= read -r line; do own+=(--env "$line"); done <<< "$image"
echo {start} > "$folder/rc.local"
"""


def emitted(
    environment: Environment, site: Site, engine: str, environ: Mapping[str, str]
) -> tuple[str, tuple[str, ...]]:
    """(text, warnings): an EDF for ce and sarus, else a bash script that takes the command as its arguments."""
    if engine == "sandbox":
        raise RunnerError(
            "the sandbox has no command line to print",
            "runner starts the sandbox from a script in the run folder",
            "use `runner shell` or `runner launch --dry-run`, or print a command line for podman: --as podman",
        )
    located = environment
    if "${RUNNER_IMAGES}" in environment.image:  # so that the output does not depend on runner
        folder = literal(str(site.images(environ)))
        located = replace(environment, image=environment.image.replace("${RUNNER_IMAGES}", folder))
    origin = f"From {environment.path or environment.name} for site {site.name}, by `runner env emit --as {engine}`."
    # raises RunnerError if the engine cannot express the environment
    attachment = attach(located, site, engine, environ)
    if engine in {"ce", "sarus"}:
        full, _ = decided(located, site, engine, environ)
        write = emit_edf if engine == "ce" else sarus.edf
        return write(
            full, f"{origin}\nUse: {_USE[engine]}", sources=f"site {site.name}"
        ), attachment.notes
    if engine in {"podman", "docker"}:
        full, notes = without_defaults(
            with_site(located, site), environ, only=("image", "mounts", "devices")
        )
        return _container_script(full, site, engine, origin), (*notes, *attachment.notes)
    prefix, before = attachment.prefix, ""
    if engine == "enroot":
        conf = attachment.files["payload/enroot.conf"]
        before = (
            f"conf=$(mktemp)\ntrap 'rm -f \"$conf\"' EXIT\ncat > \"$conf\" << 'END'\n{conf}END\n"
        )
        prefix = tuple("${conf}" if word.endswith("/enroot.conf") else word for word in prefix)
    command = ("srun", *attachment.flags, *prefix) if engine == "pyxis" else prefix
    use = _USE.get(engine, "bash THIS_FILE COMMAND…")
    return _script(origin, use, attachment.exports, command, before=before), attachment.notes


def _container_script(environment: Environment, site: Site, engine: str, origin: str) -> str:
    """A script with one `podman run` or `docker run`. Words before the command do what the options cannot."""
    squashfs, workdir = environment.is_squashfs, environment.workdir
    native = workdir if workdir and not squashfs and not has_variables(workdir) else None
    options: list[tuple[str, ...]]
    options = [
        ("--volume", f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}")
        for m in environment.mounts
    ]
    options += [("--device", device) for device in environment.devices]
    if site.gpus_per_node and not environment.devices:
        options.append(
            ("--gpus", "all") if engine == "docker" else ("--device", "nvidia.com/gpu=all")
        )
    if native:
        options.append(("--workdir", native))
    if not environment.writable:
        options.append(("--read-only",))
        if engine == "docker" and "/tmp" not in {mount.target for mount in environment.mounts}:
            options.append(("--tmpfs", "/tmp:exec,mode=1777"))
    if not environment.entrypoint and not squashfs:
        options.append(("--entrypoint", ""))
    # rootless podman has no --ipc host
    shared = (
        "--rm",
        "--interactive",
        "--network",
        "host",
        "--uts",
        "host",
        "--volume",
        "/dev/shm:/dev/shm",
    )
    command = (engine, "run", *shared, *(word for option in options for word in option))
    inside = inside_words(environment.env, None if native else workdir)
    before, image = _container_image(environment, engine)
    raw = ('"${host[@]}"', *image, *(live(word) for word in inside))
    return _script(origin, "bash THIS_FILE COMMAND…", {}, command, before=before, raw=raw)


def _container_image(environment: Environment, engine: str) -> tuple[str, tuple[str, ...]]:
    """(bash lines that determine which variables the image sets, bash words that name the image)."""
    image = live(slashed(environment, engine))
    if environment.is_squashfs:
        start = "" if environment.entrypoint else "'exec \"$@\"'"
        rc = '--volume "$folder/rc.local:/etc/rc.local:ro"'
        words = ('"${own[@]}"', rc, '--rootfs "$folder/image:O"', "/bin/sh /etc/rc")
        return _MOUNTED.format(image=image, start=start) + _HOST, words
    find = f"{engine} {_INSPECT} {image} > /dev/null 2>&1 || {engine} pull {image} >&2\n"
    return f"{find}image=$({engine} {_INSPECT} {image})\n{_HOST}", (image,)


def _script(
    origin: str,
    use: str,
    exports: Mapping[str, str],
    command: tuple[str, ...],
    *,
    before: str = "",
    raw: tuple[str, ...] = (),
) -> str:
    """The script: variables, the lines `before`, and the command, followed by `raw` bash words. It does not exec
    the command if it has set a trap, so that it can clean up afterwards."""
    lines = ["#!/usr/bin/env bash", f"# {origin}", f"# Use: {use}"]
    lines += ["# shellcheck disable=SC2016  # what looks like a variable there is text", "set -eu"]
    lines += [f"export {name}={live(value)}" for name, value in exports.items()]
    rows = [] if "trap " in before else ["exec"]
    for word in (*(live(word) for word in command), *raw, '"$@"'):
        if not rows or word.startswith(("-", '"$')):
            rows.append(word)
        else:
            rows[-1] += f" {word}"
    return "\n".join(lines) + "\n" + before + " \\\n  ".join(rows) + "\n"
