"""Build an image from a recipe into an engine's storage: first make a plan, then run its steps."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from runner import __version__
from runner.errors import RunnerError
from runner.images.build import host_settings
from runner.images.build.base import (
    BuildContext,
    BuildOptions,
    ResolvedBase,
    base_release,
    debian_steps,
    known_bases,
    resolve_base,
    shown,
)
from runner.images.build.copies import check_copies
from runner.images.build.host_settings import HostSettings
from runner.images.build.steps import Step, bash, run_logged, run_quietly
from runner.images.engine import Engine, choose_engine, open_store
from runner.images.recipe import (
    Recipe,
    check_platform,
    content_hash,
    context_files,
    declares_base,
    files_hash,
    with_arguments,
    with_build_args,
)
from runner.images.sources.engine_storage import Image
from runner.machine import files, folders, probe, process
from runner.machine.folders import cache_folder
from runner.machine.report import Report


def build(
    recipe: Recipe, options: BuildOptions, environ: Mapping[str, str], report: Report
) -> Image:
    """The recipe's image. It is built unless the storage already has it.

    Raises RunnerError for a missing engine or base, and for a failed step (with its last lines and its log).
    """
    context, recipe = prepare(recipe, options, environ, report)
    if not options.no_cache:
        for known in known_bases(recipe, context):
            if image := _built_before(recipe, known, context):
                return image
    folder = context.log.parent
    with files.locked(folder / recipe.name):
        head = f"# recipe: {recipe.path}\n# engine: {context.engine.name}\n# platform: {context.platform}\n"
        files.write(context.log, head)
        base = resolve_base(recipe, context, refresh=options.no_cache)
        # another process may have built it while this one waited for the lock
        image = None if options.no_cache else _built_before(recipe, base, context)
        if image:
            return image
        if recipe.bases and not declares_base(recipe.containerfile.read_text()):
            name = recipe.containerfile.name
            report.warn(
                f"{name} has no `ARG BASE` before its first FROM, so the recipe's base has no effect"
            )
        settings = offered_settings(context.engine, base, environ)
        report_settings(settings, context.engine, environ, report)
        tag = _tag(recipe, base, context)
        # a killed build leaves its folder behind, possibly with files that the recipe no longer lists
        folders.remove(context.staging)
        try:
            steps = plan_build(recipe, context, base, settings, tag)
            labels = len(image_labels(recipe, base, "")) if context.engine.name == "podman" else 0
            progress = BuildProgress(
                report, hide_arguments=bool(settings.arguments), hide_labels=labels
            )
            _carry_out(steps, recipe, context, progress, lambda: _tag(recipe, base, context) == tag)
        finally:
            folders.remove(context.staging)
        image = _just_built(recipe, tag, context)
        if _tag(recipe, base, context) != tag:
            report.warn(
                f"files of the recipe changed during the build; {image.reference} contains their earlier versions"
            )
        return image


def dry_run(
    recipe: Recipe, options: BuildOptions, environ: Mapping[str, str], report: Report
) -> str:
    """A bash script that does the same as `build`. Nothing is downloaded, built or staged.

    If the digests of all bases are unknown without asking a registry, the script uses the recipe's first base, and
    computes the content hash from its name. Credentials in URLs of package indexes are left out.
    """
    context, recipe = prepare(recipe, options, environ, report)
    known = known_bases(recipe, context)
    if known:
        base = known[0]
    else:
        first = str(recipe.bases[0])
        base = ResolvedBase(first, first, "the recipe's first", first)
    before: tuple[Step, ...] = ()
    if (
        base.reference.startswith("localhost/runner/base-")
        and context.store.find(base.reference) is None
    ):
        made = next(entry for entry in recipe.bases if entry.debian)
        folder = Step("a folder for the root file system", ("mkdir", "-p", str(context.staging)))
        archive = context.staging / "root.tar"
        before = (
            folder,
            *debian_steps(made, context.engine, context.platform, base.reference, archive),
        )
        if made is not recipe.bases[0]:
            report.warn(
                f"the script below builds a Debian base, but `runner build` would first try to pull {recipe.bases[0]}"
            )
    settings = offered_settings(context.engine, base, environ)
    clean = {name: host_settings.without_credentials(text) for name, text in settings.files.items()}
    if clean != dict(settings.files):
        report.warn(
            "credentials in URLs (package index, mirror, proxy) are replaced by ***: add them before you run the script"
        )
    tag = _tag(recipe, base, context)
    steps = plan_build(recipe, context, base, replace(settings, files=clean), tag)
    return bash(
        (*before, *steps, Step("remove the private folder", ("rm", "-r", str(context.staging))))
    )


def prepare(
    recipe: Recipe, options: BuildOptions, environ: Mapping[str, str], report: Report
) -> tuple[BuildContext, Recipe]:
    """The context of a build, and the recipe with the user's build arguments added."""
    engine = choose_engine(options.engine, environ)
    report.say(f"engine: {engine.name} ({engine.why})")
    for note in engine.notes:
        report.detail(note)
    platform = check_platform(recipe, options.platform)
    check_runnable(platform)
    check_copies(recipe)
    log = cache_folder(environ) / "build" / f"{recipe.name}.log"
    context = BuildContext(
        engine=engine,
        store=open_store(engine, environ),
        platform=platform,
        log=log,
        report=report,
        options=options,
    )
    return context, with_build_args(recipe, options.build_args)


def plan_build(
    recipe: Recipe, context: BuildContext, base: ResolvedBase, settings: HostSettings, tag: str
) -> list[Step]:
    """The steps of a build: a private folder with the files that the recipe lists, then the engine's build."""
    engine, name, staging = context.engine, f"{recipe.repository}:{tag}", context.staging
    folder, containerfile = staging / "context", staging / "Containerfile"
    text = with_arguments(recipe.containerfile.read_text(), settings.arguments)
    steps = [
        Step(
            "a private folder for the files of the build",
            ("install", "-d", "-m", "700", str(staging)),
        )
    ]
    steps.append(Step("its context", ("mkdir", "-p", str(folder))))
    listed = context_files(recipe)
    if listed:
        # from a list, because the file names of a large project do not fit on a command line
        names = staging / "files"
        steps.append(
            write_step("the names of the files that the recipe lists", names, "\n".join(listed))
        )
        copy = (
            "xargs",
            "-a",
            str(names),
            "-d",
            "\\n",
            "cp",
            "-P",
            "-p",
            "--parents",
            "-t",
            str(folder),
            "--",
        )
        steps.append(Step("the files", copy, cwd=recipe.root))
    steps.append(write_step("the Containerfile", containerfile, text))
    for file, content_text in settings.files.items():
        # readable for every user inside the build, such as apt's; the private folder excludes the users of the host
        steps.append(
            write_step(
                f"the host's {file}, for the build only", staging / file, content_text, 0o644
            )
        )
    argv = [engine.name, "build", f"--platform={context.platform}", "--network=host"]
    argv += [f"--build-arg={key}={value}" for key, value in recipe.build_args.items()]
    if base.reference:
        argv.append(f"--build-arg=BASE={base.reference}")
    labels = image_labels(recipe, base, tag)
    argv += [f"--label={key}={value}" for key, value in labels.items()]
    if context.options.no_cache:
        argv.append("--no-cache")
    argv += engine_flags(engine, settings, staging)
    argv += recipe.flags
    argv += [f"--tag={name}", f"--file={containerfile}", str(folder)]
    steps.append(Step(f"build {name}", tuple(argv), engine.env, logged=True))
    for other in other_names(recipe, context):
        steps.append(Step("another name", (engine.name, "tag", name, other), engine.env))
    return steps


def write_step(why: str, path: Path, text: str, mode: int = 0o600) -> Step:
    """A step that writes a text file, with a newline at its end."""
    return Step(why, write=path, text=text if text.endswith("\n") else f"{text}\n", mode=mode)


def engine_flags(engine: Engine, settings: HostSettings, staging: Path) -> tuple[str, ...]:
    """Flags only for podman: read-only mounts for the build, and the image format that keeps SHELL and HEALTHCHECK.

    enroot can read Docker manifests from every registry, but OCI manifests only from some.
    """
    if engine.name != "podman":
        return ()
    own = tuple((str(staging / name), f"{host_settings.INSIDE}/{name}") for name in settings.files)
    mounts = (f"--volume={source}:{target}:ro" for source, target in (*own, *settings.mounts))
    return ("--format=docker", *mounts)


def other_names(recipe: Recipe, context: BuildContext) -> tuple[str, ...]:
    """The names of the image besides NAME:HASH. `import NAME` uses `latest`."""
    latest = f"{recipe.repository}:latest"
    return (latest, context.options.tag) if context.options.tag else (latest,)


def image_labels(recipe: Recipe, base: ResolvedBase, tag: str) -> dict[str, str]:
    """The OCI labels of an image: its origin. Source: image-spec, annotations.md."""
    labels = {
        "org.opencontainers.image.title": recipe.name,
        **shown(base),
        "runner.recipe": recipe.name,
        "runner.recipe.files": files_hash(recipe),
        "runner.content": tag,
        "runner.version": __version__,
    }
    if revision := git_revision(recipe.root):
        labels["org.opencontainers.image.revision"] = revision
    return labels


def git_revision(folder: Path) -> str:
    """The commit of the work tree, with the suffix `-dirty` if files differ; empty outside git."""
    if process.which("git") is None:
        return ""
    commit = process.run(("git", "-C", str(folder), "rev-parse", "HEAD"), check=False)
    if commit.exit_code != 0:
        return ""
    status = process.run(
        ("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"), check=False
    )
    return commit.stdout.strip() + ("-dirty" if status.stdout.strip() else "")


def check_runnable(platform: str) -> None:
    """Raise RunnerError if this machine cannot run programs of the platform."""
    architecture = platform.split("/")[1]
    handler = {"arm64": "qemu-aarch64", "amd64": "qemu-x86_64"}.get(
        architecture, f"qemu-{architecture}"
    )
    if (
        architecture != probe.architecture()
        and not Path("/proc/sys/fs/binfmt_misc", handler).exists()
    ):
        raise RunnerError(
            f"cannot build for {platform} on this machine",
            f"its processor is {probe.architecture()}, and no emulator ({handler}) is registered",
            f"build on a machine whose processor is {architecture}, or ask an admin to install qemu-user-static",
        )


def offered_settings(
    engine: Engine, base: ResolvedBase, environ: Mapping[str, str]
) -> HostSettings:
    """The host's package settings for the build."""
    if engine.name != "podman":
        return HostSettings()
    pip = host_settings.pip_settings(host_settings.pip_layers(environ), environ)
    host = host_settings.release(files.text_of("/etc/os-release"))
    sources, proxy = host_settings.read_sources(), host_settings.proxies()
    if not proxy and not host_settings.own_mirror(sources, host[1]):
        return pip
    release = base_release(base, engine)
    return host_settings.join(pip, host_settings.apt_settings(release, host, sources, proxy))


def report_settings(
    settings: HostSettings, engine: Engine, environ: Mapping[str, str], report: Report
) -> None:
    """Report which of the host's settings the build uses."""
    if engine.name != "podman" and host_settings.pip_settings(
        host_settings.pip_layers(environ), environ
    ):
        report.warn(
            "docker cannot mount files into a build, "
            "so the build does not see this machine's pip configuration and CA bundle"
        )
    for place in settings.missing:
        report.warn(f"ignoring {place} from pip's configuration: it does not exist")
    if settings.notes:
        report.say(
            "the build uses these settings of this machine, but does not store them in the image: "
            f"{', '.join(settings.notes)}"
        )
    if proxy := host_settings.proxy_settings(environ):
        report.say(f"the build uses the proxy {proxy}")


def _tag(recipe: Recipe, base: ResolvedBase, context: BuildContext) -> str:
    return content_hash(recipe, base.digest, recipe.build_args, context.platform)


def _built_before(recipe: Recipe, base: ResolvedBase, context: BuildContext) -> Image | None:
    """The existing image with the same inputs, or None. Its other names are moved to it."""
    image = context.store.find(f"{recipe.repository}:{_tag(recipe, base, context)}")
    if image is None:
        return None
    context.report.say(f"{image.reference} was already built from the same inputs")
    for name in other_names(recipe, context):
        process.run((context.engine.name, "tag", image.reference, name), env=context.engine.env)
    return image


def _just_built(recipe: Recipe, tag: str, context: BuildContext) -> Image:
    name = f"{recipe.repository}:{tag}"
    image = context.store.find(name)
    if image is None:
        why = f"the build succeeded, but the storage of {context.engine.name} has no image of that name"
        raise RunnerError(f"the image {name} is missing after its build", why, "build again")
    return image


def _carry_out(
    steps: list[Step],
    recipe: Recipe,
    context: BuildContext,
    progress: BuildProgress,
    unchanged: Callable[[], bool],
) -> None:
    for step in steps:
        if not step.logged:
            run_quietly(step)
            continue
        if not unchanged():
            raise RunnerError(
                f"files of recipe {recipe.name!r} changed while they were copied",
                "the image is tagged with a hash of these files, so they must not change during the build",
                "build again",
            )
        code = run_logged(step, context.log, progress.line)
        context.report.passing("")  # remove the progress line
        if code != 0:
            at = f" at {progress.step}" if progress.step else ""
            raise RunnerError(
                f"the build of {recipe.name!r} failed{at}",
                "\n".join(progress.last_lines)
                or f"the engine ended with exit code {code} and printed nothing",
                f"fix the cause, and build again (finished steps are cached); the whole log: {context.log}",
            )


# podman: "STEP 3/7: RUN x", with several stages "[1/2] STEP 3/7: RUN x"; docker's classic builder: "Step 3/7 : RUN x";
# BuildKit's plain progress: "#7 [build 3/7] RUN x"
_STEP = re.compile(
    r"^(?:\[(?P<stage>\d+/\d+)\] )?step (?P<step>\d+/\d+) ?: (?P<words>.*)"
    r"|^#\d+ \[(?:(?P<name>\S+) )?\s*(?P<kit>\d+/\d+)\] (?P<kit_words>.*)",
    re.IGNORECASE,
)
_KEPT_LINES = 15


class BuildProgress:
    """Reports each step when it begins, and stores the last lines of the current one."""

    def __init__(
        self, report: Report, *, hide_arguments: bool = False, hide_labels: int = 0
    ) -> None:
        """`hide_arguments`: runner added an ARG after each FROM, which is neither shown nor counted.

        `hide_labels`: nor are that many labels.
        """
        self.report = report
        self.hide_arguments, self.hide_labels = hide_arguments, hide_labels
        self.step = ""
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def line(self, text: str) -> None:
        """Process one line of the build's output."""
        if found := _STEP.match(text):
            self._begin(found)
        elif text.strip():
            self.last_lines.append(text)
            self.report.passing(text)

    def _begin(self, found: re.Match[str]) -> None:
        stage = found["stage"] or found["name"] or ""
        number, total = (int(part) for part in (found["step"] or found["kit"]).split("/"))
        words = found["words"] or found["kit_words"] or ""
        if self.hide_arguments and words.startswith("ARG ") and number == 2:
            return
        # podman runs each --label as a step at the end of the last stage
        if "/" not in stage or len(set(stage.split("/"))) == 1:
            total -= self.hide_labels
        if number > total:
            return
        total -= self.hide_arguments
        number -= self.hide_arguments and number > 1
        self.step = f"step {number}/{total}{f' of stage {stage}' if stage else ''}: {words}"
        self.last_lines.clear()
        self.report.say(_short(self.step))


def _short(text: str, width: int = 110) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= width else one_line[: width - 1] + "…"
