"""The output of `runner env emit`: text for plain srun or a container engine, to use without runner."""

from collections.abc import Mapping
from dataclasses import replace

from runner.environments.engines import attach, decided, engine_of, with_site
from runner.environments.engines.engine import DockerOptions, Engine
from runner.environments.engines.shared import (
    has_variables,
    inside_words,
    slashed,
    without_defaults,
)
from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.expansion import literal
from runner.quoting import live
from runner.site import Site

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
    """(text, warnings). The text is an EDF if the engine reads it, else a bash script that takes the
    command as its arguments."""
    chosen = engine_of(engine)
    if not chosen.has_command_line:
        raise RunnerError(
            f"the {engine} has no command line to print",
            f"runner starts the {engine} from a script in the run folder",
            "use `runner shell` or `runner launch --dry-run`, or print a command line for podman: --as podman",
        )
    located = environment
    if "${RUNNER_IMAGES}" in environment.image:  # so that the output does not depend on runner
        folder = literal(str(site.images(environ)))
        located = replace(environment, image=environment.image.replace("${RUNNER_IMAGES}", folder))
    origin = f"From {environment.path or environment.name} for site {site.name}, by `runner env emit --as {engine}`."
    # raises RunnerError if the engine cannot express the environment
    attachment = attach(located, site, engine, environ)
    if chosen.reads_edf:
        full, _ = decided(located, site, chosen, environ)
        comment = f"{origin}\nUse: {chosen.usage}"
        return chosen.write_edf(full, comment, sources=f"site {site.name}"), attachment.notes
    if chosen.docker_options is not None:
        full, notes = without_defaults(
            with_site(located, site), environ, only=("image", "mounts", "devices")
        )
        script = _container_script(full, site, chosen, chosen.docker_options, origin)
        return script, (*notes, *attachment.notes)
    command, before = attachment.prefix, ""
    if chosen.settings_file:
        conf = attachment.files[chosen.settings_file]
        before = (
            f"conf=$(mktemp)\ntrap 'rm -f \"$conf\"' EXIT\ncat > \"$conf\" << 'END'\n{conf}END\n"
        )
        named = f"/{chosen.settings_file}"
        command = tuple("${conf}" if word.endswith(named) else word for word in command)
    if chosen.srun_option:
        command = ("srun", *attachment.flags, *command)
    script = _script(origin, chosen.usage, attachment.exports, command, before=before)
    return script, attachment.notes


def _container_script(
    environment: Environment, site: Site, engine: Engine, docker: DockerOptions, origin: str
) -> str:
    """A script with one `podman run` or `docker run`. Words before the command do what the options cannot."""
    squashfs, workdir = environment.is_squashfs, environment.workdir
    native = workdir if workdir and not squashfs and not has_variables(workdir) else None
    command = [engine.name, "run", "--rm", "--interactive"]
    # rootless podman has no --ipc host
    command += ["--network", "host", "--uts", "host", "--volume", "/dev/shm:/dev/shm"]
    for mount in environment.mounts:
        mode = "ro" if mount.read_only else "rw"
        command += ["--volume", f"{mount.source}:{mount.target}:{mode}"]
    for device in environment.devices:
        command += ["--device", device]
    if site.gpus_per_node and not environment.devices:
        command += docker.gpus
    if native:
        command += ["--workdir", native]
    if not environment.writable:
        command.append("--read-only")
        mounted = "/tmp" in {mount.target for mount in environment.mounts}
        if docker.read_only_tmp and not mounted:
            command += ["--tmpfs", "/tmp:exec,mode=1777"]
    if not environment.entrypoint and not squashfs:
        command += ["--entrypoint", ""]
    inside = inside_words(environment.env, None if native else workdir)
    before, image = _container_image(environment, engine.name)
    raw = ('"${host[@]}"', *image, *(live(word) for word in inside))
    return _script(origin, engine.usage, {}, tuple(command), before=before, raw=raw)


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
