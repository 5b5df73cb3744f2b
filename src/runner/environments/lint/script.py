"""Rules for a batch script: its directives, its steps, and the launcher in them; and what its text consists of."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from runner.bash import HereDocument, commands, here_documents
from runner.environments.environment import Environment
from runner.environments.lint.finding import Finding, Setting, facts_of, finding
from runner.images.reference import parse_reference
from runner.located_toml import Place
from runner.machine.secrets import LEAST_LENGTH, is_placeholder, is_secret_name, looks_secret
from runner.option_grammar import SRUN, Option, split

# commands that only mention programs, in their arguments
_MENTIONS = {
    ("echo",),
    ("printf",),
    ("which",),
    ("type",),
    ("alias",),
    ("command", "-v"),
    ("command", "-V"),
}
_SRUN = re.compile(r"(?<![\w./$-])srun(?=\s)")
_ASSIGNED = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\S*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_LEVELS = 3  # of variables that refer to others
_QUOTED = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """One command, or the body of a here-document."""

    number: int
    text: str
    early: str
    """the same text, with spaces in place of everything that this script's shell does not expand: single quotes,
    `\\$`"""
    mentions: bool = False
    """`echo`, or another command that only mentions the programs that it names"""


@dataclass(frozen=True)
class Script:
    """A batch script. Directives are the `#SBATCH` lines that sbatch reads: those before the first command."""

    path: Path
    directives: tuple[Line, ...]
    late: tuple[Line, ...]
    commands: tuple[Line, ...]
    nested: tuple["Script", ...] = ()
    """the batch scripts in its here-documents"""

    @property
    def is_batch(self) -> bool:
        """Whether sbatch gets this script: not one that only submits others, and none that a step runs."""
        submits = bool(self.nested) or any(
            re.search(r"(?<![\w./-])sbatch(?=\s)", line.text) for line in self.commands
        )
        return bool(self.directives or (self.steps and not submits))

    @cached_property
    def steps(self) -> tuple["Step", ...]:
        """The commands that call srun."""
        values = {}
        for line in self.commands:
            if match := _ASSIGNED.match(line.text):
                values[match[1]] = match[2].strip("\"'").replace("\n", " ")
        return tuple(
            _step(line, values)
            for line in self.commands
            if not line.mentions and _SRUN.search(line.text)
        )

    def given(self, *names: str) -> Iterator[tuple[Line, str]]:
        """The value of an option in each directive and each step that has it; empty if it has no value."""
        places = [(line, option(line.text, *names)) for line in self.directives]
        places += [(step.line, step.option(*names)) for step in self.steps]
        yield from ((line, value) for line, value in places if value is not None)

    def option(self, *names: str) -> str | None:
        """The value of the last such option in the directives; empty if it has no value."""
        values = [option(line.text, *names) for line in self.directives]
        found = [value for value in values if value is not None]
        return found[-1] if found else None


@dataclass(frozen=True)
class Step:
    """A command that calls srun."""

    line: Line
    text: str
    """the command, with the variables that the script sets replaced by their values"""
    options: tuple[Option, ...]
    """those before the program, which has options of its own"""
    is_known: bool
    """whether the options are known. A variable that the script does not set may stand for any options."""
    program: tuple[str, ...] = ()
    """the program and its arguments, without quotes"""

    def option(self, *names: str) -> str | None:
        """The value of the last such option of srun; None if it is missing, and empty if it has no value."""
        short = [name.lstrip("-") for name in names]
        wanted = {SRUN.short.get(name, name) for name in short}
        found = [option.value or "" for option in self.options if option.name in wanted]
        return found[-1] if found else None


def _step(line: Line, values: Mapping[str, str]) -> Step:
    text = line.text
    for _ in range(_LEVELS):
        text = _VARIABLE.sub(lambda found: values.get(found[1], found[0]), text)
    command = next(iter(commands(_SRUN.split(text, maxsplit=1)[-1])), None)
    words = [re.sub("[\"']", "", word) for word in command.words] if command else []
    options, rest = split(words, SRUN)
    is_known = True
    while rest and rest[0].startswith("$"):
        more, rest = split(rest[1:], SRUN)
        options, is_known = (*options, *more), False
    return Step(line, text, options, is_known, tuple(rest))


def option(text: str, *names: str) -> str | None:
    """The value of an option in a command line; None if the option is missing."""
    for name in names:
        form = rf"{name}[=\s]+" if name.startswith("--") else rf"{name}\s*=?"
        if match := re.search(rf"(?<!\S){form}(\"[^\"]*\"|'[^']*'|[^\s\"']+)", text):
            return match[1].strip("\"'")
        if re.search(rf"(?<!\S){name}(?!\S)", text):
            return ""
    return None


def is_script(path: Path) -> bool:
    """Whether a file begins with `#!`."""
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


# stands for a dollar sign that the shell around a here-document has expanded
_EXPANDED = "\x01"
_UNKNOWN = re.compile(_EXPANDED + r"(?:\{[^{}]*\}|\([^()]*\)|\w+)")


def parse_script(text: str, path: Path, before: int = 0) -> Script:
    """The script of a text, of which the first line is the one after the line `before` of the file."""
    documents = here_documents(text)
    inside = {
        number
        for each in documents
        for number in range(each.line, each.line + each.body.count("\n"))
    }
    directives, late, seen = list[Line](), list[Line](), False
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if number in inside:
            continue
        if line.startswith("#SBATCH"):
            words = _UNKNOWN.sub("…", line.removeprefix("#SBATCH").strip())
            (late if seen else directives).append(Line(number + before, words, words))
        elif line.strip() and not line.lstrip().startswith("#"):
            seen = True
    scripts = [each for each in documents if _is_batch_script(each, text)]
    others = [each for each in documents if each not in scripts]
    found = sorted(_lines(text, others), key=lambda line: line.number)
    return Script(
        path,
        tuple(directives),
        tuple(late),
        tuple(replace(line, number=line.number + before) for line in found),
        tuple(parse_script(_as_written(each), path, each.line - 1 + before) for each in scripts),
    )


def _is_batch_script(document: HereDocument, text: str) -> bool:
    """Whether a here-document is a script for sbatch."""
    if re.search("^#SBATCH", document.body, re.MULTILINE):
        return True
    opening = text.replace("\r\n", "\n").split("\n")[document.line - 2]
    return bool(re.search(r"(?<![\w./-])sbatch\s", opening)) and document.body.startswith("#!")


def _as_written(document: HereDocument) -> str:
    """The text that the program gets, with _EXPANDED in place of the dollar signs that the shell expands."""
    if document.quoted:
        return document.body
    return re.sub(r"\\([$`\\])|\$(?=[\w{(])", lambda found: found[1] or _EXPANDED, document.body)


def _lines(text: str, documents: Sequence[HereDocument]) -> Iterator[Line]:
    """The commands and the bodies of here-documents, in their order."""
    for command in commands(text):
        words = command.raw.replace("\\\n", " ")
        early = _QUOTED.sub(_blank, words)
        mentions = bool({command.words[:1], command.words[:2]} & _MENTIONS)
        mentions = mentions and not re.search(r"[(`]\s*srun\s", words)
        yield Line(
            command.line, words.replace(_EXPANDED, "$"), early.replace(_EXPANDED, "$"), mentions
        )
    for document in documents:
        # bash expands the body, unless its mark is quoted
        body = document.body.replace(_EXPANDED, "$")
        yield Line(
            document.line, body, "" if document.quoted else document.body.replace("\\$", "  ")
        )


def _blank(quoted: re.Match[str]) -> str:
    """Replace what the shell does not expand by spaces: escapes, single quotes, and escapes within double quotes."""
    text = quoted[0]
    if text.startswith('"'):
        return re.sub(r"\\.", "  ", text, flags=re.DOTALL)
    # a here-document is expanded within single quotes too
    return re.sub(rf"[^{_EXPANDED}]", " ", text)


TORCHRUN = re.compile(r"\btorchrun\b|torch\.distributed\.(run|launch)\b|\baccelerate\s+launch\b")
_RANK = r"\$\{?SLURM_(?:PROCID|NODEID|LOCALID)\b"
# torchrun, and accelerate
_DYNAMIC = re.compile(r"--rdzv[-_]backend[=\s]+[\"'\\]*(c10d|etcd)")
_NODE_RANK = re.compile(
    rf"(?:--(?:node|machine)[-_]rank[=\s]+[\"'\\]*|\b(?P<variable>RANK|LOCAL_RANK|NODE_RANK|MACHINE_RANK)=[\"']?)(?P<rank>{_RANK})"
)


@dataclass(frozen=True)
class Batch:
    """A script, the setting in which it is checked, and the environments that its steps name."""

    script: Script
    setting: Setting
    environments: Sequence[tuple[Line, Environment]]

    def say(
        self, code: str, line: Line, field: str, reason: str, fix: str = "", severity: str = ""
    ) -> Finding:
        """A finding at a line."""
        return finding(
            code, field, Place(self.script.path, line.number), reason, fix, severity=severity
        )

    def text(self) -> str:
        """All commands."""
        return "\n".join(line.text for line in self.script.commands)


def directives(batch: Batch) -> Iterator[Finding]:
    """`#SBATCH` lines that sbatch ignores or rejects. Source: sbatch(1) 25.11; CSCS documentation,
    container-engine/run.md."""
    for line in batch.script.directives:
        if option(line.text, "--environment") is not None:
            reason = "the whole script, srun included, runs inside the container, where Slurm's plugins do not load"
            yield batch.say(
                "sbatch-environment", line, "#SBATCH", reason, "move --environment to each srun"
            )
        if option(line.text, "--container-image") is not None and batch.script.steps:
            reason = "the whole script, srun included, runs inside the container, which usually has no Slurm"
            yield batch.say("sbatch-container", line, "#SBATCH", reason)
        if "$" in line.text.partition(" #")[0]:
            reason = f"sbatch does not expand variables in this line: {line.text}"
            yield batch.say("sbatch-variable", line, "#SBATCH", reason)
        unquoted = re.sub(r"\"[^\"]*\"|'[^']*'", "", line.text)
        if re.search(r"(?<=[^\s\\])#", re.split(r"\s#", unquoted)[0]):
            yield batch.say(
                "sbatch-hash",
                line,
                "#SBATCH",
                f"sbatch reads the text after the # inside this line as a comment: {line.text}",
            )
    for line in batch.script.late:
        yield batch.say(
            "sbatch-late", line, "#SBATCH", f"sbatch ignores #SBATCH after a command: {line.text}"
        )


def site_rules(batch: Batch) -> Iterator[Finding]:
    """Options that the site requires in every job."""
    site, script = batch.setting.site, batch.script
    top = script.directives[0] if script.directives else Line(1, "", "")
    known = (
        site.account
        or batch.setting.environ.get("SBATCH_ACCOUNT")
        or script.option("-A", "--account")
    )
    if site.account_required and not known and script.is_batch:
        yield batch.say("account-missing", top, "#SBATCH", f"site {site.name} requires an account")
    for flag, why in site.refused.items():
        name, _, value = flag.partition("=")
        for line, given in script.given(name):
            if not value or given == value:
                yield batch.say(
                    "sbatch-refused", line, "#SBATCH", f"{flag}: {why}", "change or remove the flag"
                )


def node_rank(batch: Batch) -> Iterator[Finding]:
    """`srun torchrun --node-rank=$SLURM_PROCID`: the batch script expands it to 0 for all nodes.

    Source: torchrun of PyTorch 2.7, --node-rank: only static rendezvous, the default, uses it.
    """
    if not batch.script.is_batch:
        return  # a script that each task runs
    for line in batch.script.commands:
        for match in _NODE_RANK.finditer(line.text):
            if line.early[match.start("rank") :][:1] != "$":
                continue  # a later shell expands it
            if "srun" not in line.text and match["variable"] and not TORCHRUN.search(line.text):
                continue  # outside a step, possibly in a script that the step runs
            if not match["variable"] and _DYNAMIC.search(line.text):
                continue  # torchrun ignores it
            reason = f"{match['rank'].lstrip('${')} is expanded by the batch script, so every node gets the same value"
            yield batch.say("node-rank-too-early", line, "srun", reason)
            break


def rank_remap(batch: Batch) -> Iterator[Finding]:
    """pyxis sets RANK and LOCAL_RANK for images with PYTORCH_VERSION, everywhere but at CSCS, where an annotation
    turns it on. Source: pyxis 0.24.0, pyxis_slurmstepd.c; CSCS documentation, container-engine/run.md."""
    if re.search(r"unset\s[^\n;]*\bRANK\b|-u\s+RANK\b", batch.text()):
        return
    for step in batch.script.steps:
        if not TORCHRUN.search(step.text):
            continue
        asked = any(
            line == step.line
            and environment.annotations.get("com.pyxis.pytorch_remap_vars") == "true"
            for line, environment in batch.environments
        )
        image = step.option("--container-image") or batch.script.option("--container-image") or ""
        if asked or (image and facts_of(image, None).ngc):
            reason = "pyxis sets RANK and LOCAL_RANK for the task, but torchrun must set them"
            yield batch.say("rank-remap-torchrun", step.line, "srun", reason)


def container_image(batch: Batch) -> Iterator[Finding]:
    """The value of --container-image. Source: pyxis 0.24.0, args.c: a path begins with . or /."""
    for line, given in batch.script.given("--container-image"):
        image = given.replace("\\#", "#")
        if not image or image.startswith(("/", ".", "$")):
            continue
        if "://" in image and not image.startswith("docker://"):
            continue  # an image of an engine on the node
        if image.endswith((".sqsh", ".squashfs")):
            reason = (
                f"{image!r} is not a path, so an image of that name would be pulled from a registry"
            )
            yield batch.say(
                "relative-squashfs", line, "--container-image", reason, f"write /PATH or ./{image}"
            )
        elif parse_reference(image).separator == "/" and (batch.setting.enroot or (0,)) < (4,):
            registry = parse_reference(image).registry
            severity = "error" if batch.setting.enroot else "warning"
            reason = f"enroot before 4.0 looks for {registry!r} on Docker Hub unless `#` follows the registry"
            fix = f"write {image.replace(f'{registry}/', f'{registry}#', 1)}"
            yield batch.say(
                "slash-after-registry", line, "--container-image", reason, fix, severity
            )


_MASTER = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


def rendezvous(batch: Batch) -> Iterator[Finding]:
    """MASTER_ADDR and MASTER_PORT."""
    for line in batch.script.commands:
        if "MASTER_ADDR" in line.text or re.search(
            r"--(master[-_]addr|rdzv[-_]endpoint)", line.text
        ):
            if "SLURM_LAUNCH_NODE_IPADDR" in line.text:
                reason = "SLURM_LAUNCH_NODE_IPADDR is the address of the node that called srun"
                yield batch.say("master-address", line, "MASTER_ADDR", reason, _MASTER)
            elif re.search(r"hostname\s+(-i|-I|--ip-address|--all-ip-addresses)", line.text):
                reason = "hostname can print several addresses, including IPv6"
                yield batch.say("master-address", line, "MASTER_ADDR", reason, _MASTER)
        if match := re.search(
            r"(\bMASTER_PORT=[\"']?|--(?:master|main[-_]process)[-_]port[=\s]+|--rdzv[-_]endpoint[=\s]+\S+?:)(\d{4,5})\b",
            line.text,
        ):
            fix = "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"
            yield batch.say(
                "fixed-port", line, "MASTER_PORT", f"another job might use port {match[2]}", fix
            )


def script_secrets(batch: Batch) -> Iterator[Finding]:
    """Secrets in plain text, and secrets that `set -x` prints."""
    mentioned = False
    # also in `#SBATCH --export=ALL,NAME=VALUE`
    for line in (*batch.script.directives, *batch.script.commands):
        for name, value in re.findall(
            r"(?<![\w-])-*([A-Za-z_][\w-]*)=[\"']?([^\s\"'$`;&|(),]*)", line.text
        ):
            mentioned = mentioned or (is_secret_name(name) and line in batch.script.commands)
            secret = len(value) >= LEAST_LENGTH and looks_secret(name, value)
            if secret and not is_placeholder(value):
                reason = f"{name} contains a secret in plain text"
                yield batch.say("secret-value", line, name, reason, f"export {name} in your shell")
    traced = next(
        (line for line in batch.script.commands if re.search(r"\bset\s+-\w*x", line.early)), None
    )
    if traced and (
        mentioned or re.search(r"\$\{?\w*(TOKEN|API_?KEY|PASSWORD|SECRET)\b", batch.text())
    ):
        yield batch.say(
            "trace-prints-secrets", traced, "set -x", "set -x prints the script's token or password"
        )


def login_shell(batch: Batch) -> Iterator[Finding]:
    """Login shells: Debian's /etc/profile replaces the image's PATH."""
    for line, environment in batch.environments:
        login = re.search(r"(?<![\w./-])(?:\S*/)?(ba)?sh\s+(-\w*l\w*|--login)(?!\S)", line.text)
        if login and not environment.env.get("PATH"):
            reason = f"{login[0]!r} is a login shell: it runs /etc/profile, which replaces the PATH of Debian images"
            yield batch.say("path-lost", line, "srun", reason)


RULES: tuple[Callable[[Batch], Iterator[Finding]], ...] = (
    directives,
    site_rules,
    node_rank,
    rank_remap,
    container_image,
    rendezvous,
    script_secrets,
    login_shell,
)
