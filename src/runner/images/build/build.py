"""From a recipe to an image in an engine's storage: decided as a plan, then carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from runner import __version__
from runner.errors import RunnerError
from runner.images.build import host_settings, content
from runner.images.build import base as bases
from runner.images.build.base import ResolvedBase
from runner.images.build.containerfile import declares_base, with_additions
from runner.images.build.host_settings import HostSettings
from runner.images.build.base import Workplace
from runner.images.engine import Engine, choose_engine, open_store
from runner.images.image import Image
from runner.images.build.run import run_logged, run_quietly, start_log
from runner.images.recipe import Recipe, check_platform
from runner.machine import files, folders, process
from runner.machine.folders import cache_folder
from runner.machine.plan import Plan, Step, bash
from runner.machine.report import Report
import re
from collections import deque


@dataclass(frozen=True)
class BuildOptions:
    """What the user may choose about a build."""

    engine: str | None = None
    tag: str | None = None
    """another name for the image, beside the one with the content hash"""
    no_cache: bool = False
    platform: str | None = None
    build_args: Mapping[str, str] = field(default_factory=dict)


def build(recipe: Recipe, options: BuildOptions, environ: Mapping[str, str], report: Report) -> Image:
    """The recipe's image; built where the storage does not hold it yet.

    Raises RunnerError for a missing engine or base, and for a failing step (with its last lines and the kept log).
    """
    at, recipe = prepare(recipe, options, environ, report)
    if not options.no_cache:
        for known in bases.known_bases(recipe, at):
            if image := _built_before(recipe, known, options, at):
                return image
    folder = at.log.parent
    with files.locked(folder / recipe.name):
        start_log(at.log, {"recipe": str(recipe.path), "engine": at.engine.name, "platform": at.platform})
        base = bases.resolve_base(recipe, at, refresh=options.no_cache)
        # another process may have built it while we waited for the lock
        if not options.no_cache and (image := _built_before(recipe, base, options, at)):
            return image
        if recipe.bases and not declares_base(recipe.containerfile.read_text()):
            report.warn(f"{recipe.containerfile.name} has no `ARG BASE` before its first FROM: the base has no effect")
        settings = offered_settings(at.engine, base, environ)
        tell_settings(settings, at.engine, environ, report)
        staging = folder / f"{recipe.name}-context"
        folders.remove(staging)  # a build that was killed leaves one, with files that are not listed any more
        try:
            plan = plan_build(recipe, at.engine, base, settings, options, at.platform, staging)
            _carry_out(plan, recipe, at, BuildProgress(report, hide_arguments=bool(settings.arguments)))
        finally:
            folders.remove(staging)
        return _just_built(recipe, base, at)


def dry_run(recipe: Recipe, options: BuildOptions, environ: Mapping[str, str], report: Report) -> str:
    """The bash script that does what `build` would do; nothing is fetched, built or staged.

    Where no base is known without asking a registry, the script takes the recipe's first; its content hash is then
    that of the name. Credentials in addresses of package indexes are left out.
    """
    at, recipe = prepare(recipe, options, environ, report)
    known = bases.known_bases(recipe, at)
    first = recipe.bases[0] if recipe.bases else None
    base = known[0] if known else ResolvedBase(str(first), str(first), "the recipe's first", str(first))
    before: tuple[Step, ...] = ()
    debian = next((entry for entry in recipe.bases if base.reference.startswith("localhost/runner/base-")), None)
    if debian is not None and at.store.find(base.reference) is None:
        made = next(entry for entry in recipe.bases if entry.debian)
        before = bases.debian_steps(made, at.engine, at.platform, base.reference)
        report.warn("the script makes the Debian base; `runner build` asks the registry of the first base before")
    settings = offered_settings(at.engine, base, environ)
    clean = {name: host_settings.without_credentials(text) for name, text in settings.files.items()}
    if clean != dict(settings.files):
        report.warn("credentials of the package index are left out (***): put them in before you run the script")
    staging = at.log.parent / f"{recipe.name}-context"
    plan = plan_build(recipe, at.engine, base, replace(settings, files=clean), options, at.platform, staging)
    return bash(Plan((*before, *plan.steps, Step("the private folder goes", ("rm", "-r", str(staging))))))


def prepare(
    recipe: Recipe, options: BuildOptions, environ: Mapping[str, str], report: Report
) -> tuple[Workplace, Recipe]:
    """The workplace for a build, and the recipe with the user's build arguments laid over its own."""
    engine = choose_engine(options.engine, environ)
    report.say(f"engine: {engine.name} ({engine.why})")
    for note in engine.notes:
        report.detail(note)
    platform = check_platform(recipe, options.platform)
    check_runnable(platform)
    log = cache_folder(environ) / "build" / f"{recipe.name}.log"
    at = Workplace(engine, open_store(engine), platform, log, report)
    return at, replace(recipe, build_args={**recipe.build_args, **options.build_args})


def plan_build(
    recipe: Recipe,
    engine: Engine,
    base: ResolvedBase,
    settings: HostSettings,
    options: BuildOptions,
    platform: str,
    staging: Path,
) -> Plan:
    """The steps of a build: a private folder with the files that the recipe lists, then the engine on it."""
    tag = content.content_hash(recipe, base.digest, recipe.build_args, platform)
    name = f"{recipe.repository}:{tag}"
    context, containerfile = staging / "context", staging / "Containerfile"
    labels = image_labels(recipe, base, tag)
    text = with_additions(recipe.containerfile.read_text(), settings.arguments, labels)
    steps = [Step("a private folder for what the build may see", ("install", "-d", "-m", "700", str(staging)))]
    steps.append(Step("its context", ("mkdir", "-p", str(context))))
    listed = content.context_files(recipe)
    if listed:
        # by a list: the names of a large project do not fit on a command line
        names = staging / "files"
        steps.append(write_step("the names of the files that the recipe lists", names, "\n".join(listed)))
        copy = ("xargs", "-a", str(names), "-d", "\\n", "cp", "-P", "-p", "--parents", "-t", str(context), "--")
        steps.append(Step("the files", copy, cwd=recipe.root))
    steps.append(write_step("the Containerfile", containerfile, text))
    for file, content_text in settings.files.items():
        # every user inside the build may read it, apt's own among them; the private folder keeps out those of the host
        steps.append(write_step(f"the host's {file}, for the build only", staging / file, content_text, 0o644))
    flags = (
        *(f"--build-arg={key}={value}" for key, value in recipe.build_args.items()),
        *((f"--build-arg=BASE={base.reference}",) if base.reference else ()),
        *(("--no-cache",) if options.no_cache else ()),
        *engine_flags(engine, settings, staging),
    )
    argv = (engine.name, "build", f"--platform={platform}", "--network=host", *flags)
    argv = (*argv, f"--tag={name}", f"--file={containerfile}", str(context))
    steps.append(Step(f"build {name}", argv, engine.env))
    steps += [
        Step("another name", (engine.name, "tag", name, other), engine.env) for other in other_names(recipe, options)
    ]
    return Plan(tuple(steps))


def write_step(why: str, path: Path, text: str, mode: int = 0o600) -> Step:
    """A step that writes a text file; a newline that is missing at its end is added."""
    return Step(why, write=path, text=text if text.endswith("\n") else f"{text}\n", mode=mode)


def engine_flags(engine: Engine, settings: HostSettings, staging: Path) -> tuple[str, ...]:
    """What only podman knows: read-only mounts for the build, and the image format that keeps SHELL and HEALTHCHECK.

    enroot, too, reads docker's manifests from every registry, OCI's not from all.
    """
    if engine.name != "podman":
        return ()
    own = tuple((str(staging / name), f"{host_settings.INSIDE}/{name}") for name in settings.files)
    mounts = (f"--volume={source}:{target}:ro" for source, target in (*own, *settings.mounts))
    return ("--format=docker", *mounts)


def other_names(recipe: Recipe, options: BuildOptions) -> tuple[str, ...]:
    """The names beside NAME:HASH: `latest` is what `import NAME` reads."""
    return (f"{recipe.repository}:latest", *((options.tag,) if options.tag else ()))


def image_labels(recipe: Recipe, base: ResolvedBase, tag: str) -> dict[str, str]:
    """The OCI labels of an image: where it came from. Source: image-spec, annotations.md."""
    labels = {
        "org.opencontainers.image.title": recipe.name,
        **bases.shown(base),
        "runner.recipe": recipe.name,
        "runner.recipe.files": content.files_hash(recipe),
        "runner.content": tag,
        "runner.version": __version__,
    }
    if revision := git_revision(recipe.root):
        labels["org.opencontainers.image.revision"] = revision
    return labels


def git_revision(folder: Path) -> str:
    """The commit of the work tree, `-dirty` behind it where files differ; empty outside of git."""
    if process.which("git") is None:
        return ""
    commit = process.run(("git", "-C", str(folder), "rev-parse", "HEAD"), check=False)
    if commit.exit_code != 0:
        return ""
    status = process.run(("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"), check=False)
    return commit.stdout.strip() + ("-dirty" if status.stdout.strip() else "")


def check_runnable(platform: str) -> None:
    """Raise RunnerError where this machine cannot run the platform's programs: the build would end in exec errors."""
    from runner.machine import probe

    architecture = platform.split("/")[1]
    handler = {"arm64": "qemu-aarch64", "amd64": "qemu-x86_64"}.get(architecture, f"qemu-{architecture}")
    if architecture != probe.architecture() and not Path("/proc/sys/fs/binfmt_misc", handler).exists():
        raise RunnerError(
            f"cannot build for {platform} here",
            f"this machine is {probe.architecture()} and has no emulator ({handler}) registered",
            "build on a machine of that kind, or install qemu-user-static and binfmt-support",
        )


def offered_settings(engine: Engine, base: ResolvedBase, environ: Mapping[str, str]) -> HostSettings:
    """What of the host's package settings this build is offered."""
    if engine.name != "podman":
        return HostSettings()
    pip = host_settings.pip_settings(host_settings.pip_layers(environ), environ)
    host, sources, proxy = host_settings.host_release(), host_settings.read_sources(), host_settings.proxies()
    if not proxy and not host_settings.own_mirror(sources, host[1]):
        return pip
    release = bases.base_release(base, engine)
    return host_settings.join(pip, host_settings.apt_settings(release, host, sources, proxy))


def tell_settings(settings: HostSettings, engine: Engine, environ: Mapping[str, str], report: Report) -> None:
    """Say what of the host the build sees."""
    if engine.name != "podman" and host_settings.pip_settings(host_settings.pip_layers(environ), environ):
        report.warn("docker mounts nothing into builds: pip's configuration and CA of this machine are not offered")
    if settings.notes:
        report.say(f"offered to the build only: {', '.join(settings.notes)}")
    if proxy := host_settings.proxy_settings(environ):
        report.say(f"proxy for the build: {proxy}")


def _tag(recipe: Recipe, base: ResolvedBase, at: Workplace) -> str:
    return content.content_hash(recipe, base.digest, recipe.build_args, at.platform)


def _built_before(recipe: Recipe, base: ResolvedBase, options: BuildOptions, at: Workplace) -> Image | None:
    """The image of the same inputs, where the storage holds it; its other names are moved to it."""
    image = at.store.find(f"{recipe.repository}:{_tag(recipe, base, at)}")
    if image is None:
        return None
    at.report.say(f"{image.reference}: the same inputs were built before")
    for name in other_names(recipe, options):
        process.run((at.engine.name, "tag", image.reference, name), env=at.engine.env)
    return image


def _just_built(recipe: Recipe, base: ResolvedBase, at: Workplace) -> Image:
    name = f"{recipe.repository}:{_tag(recipe, base, at)}"
    image = at.store.find(name)
    if image is None:
        raise RunnerError(f"the built image {name} is not in the storage", "the engine said it was", "build again")
    return image


def _carry_out(plan: Plan, recipe: Recipe, at: Workplace, progress: BuildProgress) -> None:
    for step in plan.steps:
        if step.argv[:2] != (at.engine.name, "build"):
            run_quietly(step)
            continue
        code = run_logged(step, at.log, progress.line)
        progress.end()
        if code != 0:
            raise build_failed(recipe, progress, code, at.log)


def build_failed(recipe: Recipe, progress: BuildProgress, code: int, log: Path) -> RunnerError:
    """The error for a build that ended at a step: the step, its last lines, and where the whole log is."""
    at = f" at {progress.step}" if progress.step else ""
    return RunnerError(
        f"the build of {recipe.name!r} failed{at}",
        "\n".join(progress.last_lines) or f"the engine ended with exit code {code} and printed nothing",
        f"the whole log is kept in {log}; steps before this one are cached: mend it and build again",
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
    """Tells a report of each step as it begins, and keeps the last lines of the current one."""

    def __init__(self, report: Report, *, hide_arguments: bool = False) -> None:
        """`hide_arguments`: our own ARG stands behind each FROM; it is neither shown nor counted."""
        self.report = report
        self.hide_arguments = hide_arguments
        self.step = ""
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def line(self, text: str) -> None:
        """Take one line of the build's output."""
        if found := _STEP.match(text):
            self._begin(found)
        elif text.strip():
            self.last_lines.append(text)
            self._passing(text)

    def end(self) -> None:
        """The build is over: take the passing line away."""
        self._passing("")

    def _begin(self, found: re.Match[str]) -> None:
        stage = found["stage"] or found["name"] or ""
        number, total = (int(part) for part in (found["step"] or found["kit"]).split("/"))
        words = found["words"] or found["kit_words"] or ""
        if self.hide_arguments and words.startswith("ARG ") and number == 2:
            return
        # our one LABEL is the last instruction of the last stage
        last_stage = "/" not in stage or len(set(stage.split("/"))) == 1
        if last_stage and number == total and words.startswith("LABEL "):
            return
        total -= self.hide_arguments + last_stage
        number -= self.hide_arguments and number > 1
        self.step = f"step {number}/{total}{f' of stage {stage}' if stage else ''}: {words}"
        self.last_lines.clear()
        self.report.say(_short(self.step))

    def _passing(self, text: str) -> None:
        """A line that the next one replaces, where the report can do that."""
        show = getattr(self.report, "passing", self.report.detail)
        if text or show != self.report.detail:
            show(text)


def _short(text: str, width: int = 110) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= width else one_line[: width - 1] + "…"
