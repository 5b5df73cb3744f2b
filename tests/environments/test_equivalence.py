"""One EDF means the same on every engine: what is seen inside is what docs/environment.md promises.

Every engine that this machine has runs every environment of the table and some that hypothesis makes; the summary of
the test run says which engines ran. What the promise does not name is not compared.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from runner.environments.edf import Mount
from runner.environments.emit import emitted
from runner.environments.engines import with_site
from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.expansion import expand, literal
from runner.site_files import load_site
from tests.conftest import need
from tests.environments import look
from tests.environments.cases import ARGUMENTS, CASES, HOST, NAMES, STDIN, Case
from tests.environments.corpus import texts
from tests.environments.inside import environment_of, run_inside
from tests.environments.promise import Promise, differences, places, promised
from tests.lab.parts import BY_MARKER, PLUGINS, SLURM
from tests.lab.plugins import real_pyxis
from tests.lab.sarus import Sarus
from tests.lab.slurm import SlurmLab


@dataclass(frozen=True)
class Way:
    """One way into a container."""

    engine: str
    needs: tuple[str, ...] = ()
    """parts of the lab; without them the way is skipped, and the summary says so"""
    environ: Mapping[str, str] = field(default_factory=dict)
    slurm: SlurmLab | None = None
    only: tuple[str, ...] = tuple(CASES)
    emitted: bool = False
    """by what `runner env emit` writes, without runner"""
    image: str = ""
    """in place of the squashfs file: the name of an image"""


UNPACKED = ("nothing is set", "any text", "mounts", "read-only", "all at once")
EMITTED = (
    *("EDF over image over host", "an empty value unsets what image, host or site have", "references", "any text"),
    *("names that mean something elsewhere", "a working directory whose variable [env] changes", "the entrypoint"),
    *("read-only, with mounts and a working directory", "all at once"),
)
# plain srun expands [env] with the host's variables, and unsets none
EMITTED_SARUS = (
    "any text",
    "names that mean something elsewhere",
    "the entrypoint",
    "read-only, with mounts and a working directory",
)
ON_THE_HOST = (
    *("EDF over image over host", "an empty value unsets what image, host or site have", "any text"),
    *("names that mean something elsewhere", "a working directory", "the entrypoint", "mounts"),
)
BY_HAND = ("host", "env emit --as sarus")  # only the cases above are promised
FUSE = ("squashfuse", "/dev/fuse")
WAYS = {
    "host": Way("host", ("gcc, spank.h",), only=ON_THE_HOST),
    "sandbox": Way("sandbox", ("bubblewrap", *FUSE)),
    "sandbox, unpacked": Way("sandbox", ("bubblewrap", "unsquashfs"), {"RUNNER_SANDBOX_UNPACK": "1"}, only=UNPACKED),
    "podman": Way("podman", ("podman", *FUSE)),
    "podman, its storage": Way("podman", ("podman",)),
    "docker": Way("docker", ("dockerd",)),
    "ce, the lab's plugin": Way("ce", (*SLURM, *PLUGINS)),
    "pyxis, the lab's plugin": Way("pyxis", (*SLURM, *PLUGINS)),
    "pyxis, NVIDIA's": Way("pyxis", (*SLURM, "pyxis", "enroot")),
    "enroot": Way("enroot", ("enroot", *FUSE)),
    "apptainer": Way("apptainer", ("apptainer",)),
    "sarus, the lab's stand-in": Way("sarus", (*SLURM, *PLUGINS)),
    "env emit --as sarus": Way("sarus", (*SLURM, *PLUGINS), only=EMITTED_SARUS, emitted=True),
    "env emit --as ce": Way("ce", (*SLURM, *PLUGINS), only=EMITTED, emitted=True),
    "env emit --as pyxis": Way("pyxis", (*SLURM, *PLUGINS), only=EMITTED, emitted=True),
    "env emit --as enroot": Way("enroot", ("enroot", *FUSE), only=EMITTED, emitted=True),
    "env emit --as podman": Way("podman", ("podman", *FUSE), only=EMITTED, emitted=True),
    "env emit --as podman, its storage": Way("podman", ("podman",), only=EMITTED, emitted=True),
    "env emit --as docker": Way("docker", ("dockerd",), only=EMITTED, emitted=True),
    "env emit --as apptainer": Way("apptainer", ("apptainer",), only=EMITTED, emitted=True),
}


@pytest.fixture(scope="module")
def look_sqsh(tmp_path_factory):
    target = tmp_path_factory.mktemp("look") / "look.sqsh"
    look.make_squashfs(target)
    return target


@pytest.fixture(scope="module")
def pyxis_slurm():
    """A private Slurm with NVIDIA's own plugin."""
    with SlurmLab(nodes=1, plugins=(str(real_pyxis()),)) as lab:
        yield lab


@pytest.fixture(scope="module")
def sarus_slurm():
    """A private Slurm with the stand-in of Skybox."""
    with SlurmLab(nodes=1, plugins=("sarus",)) as lab:
        yield lab


@pytest.fixture(scope="module")
def sarus_site(look_sqsh, tmp_path_factory):
    """A store with the image."""
    site = Sarus(tmp_path_factory.mktemp("sarus") / "site")
    site.add("localhost/look:1", data=look_sqsh.read_bytes())
    return site


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, str], Any]:
    """What is dear to make, by what it is and for which way: pytest makes a fixture anew for each pair."""
    return {}


@pytest.fixture
def way(request, kept) -> Way:
    need(*WAYS[request.param].needs)
    if ("way", request.param) not in kept:
        kept["way", request.param] = opened(WAYS[request.param], request)
    return kept["way", request.param]


def opened(found: Way, request: pytest.FixtureRequest) -> Way:
    """The way with what it runs on: a cluster, an image in a storage."""
    if found.engine == "sarus":
        site, slurm = request.getfixturevalue("sarus_site"), request.getfixturevalue("sarus_slurm")
        return replace(found, slurm=slurm, environ=site.environ, image="localhost/look:1")
    if found.engine in {"ce", "pyxis"} and "pyxis" not in found.needs:
        return replace(found, slurm=request.getfixturevalue("slurm"))
    if "pyxis" in found.needs:
        return replace(found, slurm=request.getfixturevalue("pyxis_slurm"))
    if "dockerd" in found.needs:
        return replace(found, image=look.build_image("docker", {**os.environ, "DOCKER_BUILDKIT": "0"}))
    if "podman" in found.needs:
        podman = request.getfixturevalue("podman")
        found = replace(found, environ=podman.environ)
        if "squashfuse" not in found.needs:
            found = replace(found, image=look.build_image("podman", podman.environ))
    return found


def environment_for(case: Case, way: Way, squashfs: Path, here: Path) -> Environment:
    here.mkdir(parents=True)
    for name in ("home", "data", "more", "site", "a b", "a,b", "a:b", "it's $x;`y` #\\z"):
        (here / name).mkdir()
        (here / name / "mark").write_text(f"this is {name}\n")
    (here / "mark").write_text("the caller's folder\n")
    (here / "file").write_text("a file\n")
    image = way.image or str(squashfs)
    edf = case.edf.format(here=here, image=squashfs)
    environment = environment_of(here, f'image = "{image}"\n{edf}', {"EDF_PATH": str(here)})
    site = replace(
        load_site("local"), env=case.site_env, mounts=tuple(mount.format(here=here) for mount in case.site_mounts)
    )
    return with_site(environment, site)


def weaker(promise: Promise, environment: Environment, engine: str) -> Promise:
    """The promise without what docs/environment.md excepts: the host's libraries may enter through pyxis and the
    Container Engine, and the latter's login shell takes the image's PATH away."""
    login = {} if "PATH" in environment.env or engine in {"pyxis", "sarus"} else {"PATH": look.PROFILE_PATH}
    own = {name for name, value in environment.env.items() if not value}
    return replace(
        promise,
        variables={**promise.variables, **login},
        absent=promise.absent - ({"LD_LIBRARY_PATH", "LD_PRELOAD"} - own),
    )


def run_emitted(
    environment: Environment, way: Way, host: Mapping[str, str], here: Path, command: tuple[str, ...]
) -> subprocess.CompletedProcess[bytes]:
    """The command, run by what `env emit` writes."""
    written = here / "emitted"
    written.write_text(emitted(environment, load_site("local"), way.engine, host)[0])
    flags = {"ce": "--environment", "sarus": "--edf"}
    argv = ("srun", f"{flags[way.engine]}={written}") if way.engine in flags else ("bash", str(written))
    if os.geteuid() and way.engine == "podman" and not way.image:
        argv = ("podman", "unshare", *argv)  # as the file's own comment says
    environ = {**(way.slurm.environ if way.slurm else {}), **host}
    return subprocess.run(
        (*argv, *command), env=environ, cwd=here, input=STDIN.encode(), capture_output=True, timeout=600, check=False
    )


def differences_of(environment: Environment, way: Way, here: Path) -> list[str]:
    """What was seen inside and is not as promised."""
    host = {**os.environ, **way.environ, **HOST, "HOME": str(here / "home"), "WHERE": str(here)}
    host["RUNNER_RUN"] = str(here / "run")
    program, image = "/bin/look", look.IMAGE
    if way.engine == "host":  # there is no image: all is the caller's
        program, image = str(look.compile_to(here / "look")), look.Image(env=host, workdir=str(here))
    promise = promised(environment, image, host, NAMES, here, ARGUMENTS, STDIN, way.engine)
    if way.engine in {"ce", "pyxis", "sarus"}:
        promise = weaker(promise, environment, way.engine)
    (here / "run").mkdir()
    command = look.words(places(promise), ARGUMENTS, program)
    if way.emitted:
        done = run_emitted(environment, way, host, here, command)
    else:
        done = run_inside(
            environment, way.engine, here / "run", *command, environ={**way.environ, **host}, slurm=way.slurm, cwd=here,
            stdin=STDIN.encode(),
        )  # fmt: skip
    seen = look.read(done)
    if seen is None:
        return [f"it did not run (exit {done.returncode}): {done.stderr.decode(errors='replace')[-1500:]}"]
    found = differences(promise, seen, container=way.engine != "host")
    for source in ("data", "more"):
        made = here / source / ".look"
        if made.exists() and made.stat().st_uid != os.geteuid():
            found.append(f"{made} belongs to {made.stat().st_uid}")
    return found


@pytest.fixture
def outcome(request, kept, way, look_sqsh, tmp_path_factory) -> Mapping[str, tuple[str, list[str]]]:
    """Case -> the field that was refused, and what was not as promised. All cases of a way run at once."""
    key = ("outcome", request.node.callspec.params["way"])
    if key not in kept:
        folder = tmp_path_factory.mktemp("cases")

        def run(name: str) -> tuple[str, list[str]]:
            environment = environment_for(CASES[name], way, look_sqsh, folder / f"{list(CASES).index(name)}")
            try:
                return "", differences_of(environment, way, environment.path.parent)
            except RunnerError as error:
                return error.what, []

        with ThreadPoolExecutor(4) as pool:
            kept[key] = dict(zip(way.only, pool.map(run, way.only), strict=True))
    return kept[key]


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """What tells the summary which parts a way runs on, and which of them a machine may lack."""
    needs = WAYS[name].needs
    optional = [getattr(pytest.mark, marker) for marker, part in BY_MARKER.items() if part in needs]
    return (pytest.mark.engine(name), pytest.mark.uses(*needs), *optional)


PAIRS = [
    pytest.param(name, case, marks=marks(name), id=f"{name}: {case}") for name, way in WAYS.items() for case in way.only
]


@pytest.mark.parametrize(("way", "name"), PAIRS, indirect=["way"])
def test_the_inside_is_as_promised_or_the_engine_refuses(outcome, way, name):
    refused, found = outcome[name]
    case = CASES[name]
    if expected := case.refused.get(way.engine):
        assert f"the engine {way.engine!r} cannot use the value of {expected}" in refused
    elif way.engine in case.stopped:
        assert "cannot mount" in found[0]
    else:
        assert (refused, found) == ("", [])


REFERENCES = ("${GREETING}", "${ONLY_HOST}", "${PATH}", "${HERE}", "${EMPTY_HOST:-empty}", "${HOST_OR_IMAGE:-never}")
plain = texts.filter(lambda text: "${" not in text).map(literal)
defaults = plain.filter(lambda text: "}" not in text).map(lambda text: f"${{NEVER:-{text}}}")
values = st.lists(st.one_of(plain, st.sampled_from(REFERENCES), defaults), max_size=4).map("".join)
names = st.one_of(
    st.from_regex(r"V[A-Za-z0-9_]{0,6}", fullmatch=True), st.sampled_from((*NAMES, "GREETING", "PATH", "HERE"))
)
ordinary = st.from_regex(r"[a-z0-9_][a-z0-9._+=-]{0,7}", fullmatch=True)
strange = st.text("a ,:;$`'\"\\#!*&|<>()é🦙%@~\t", min_size=1, max_size=30).filter(lambda name: name != "..")
folders = st.one_of(ordinary, ordinary, ordinary, ordinary, strange)
flags = st.sampled_from(((), ("ro",), ("rw",)))
mounts = st.lists(st.tuples(folders, flags), max_size=3, unique_by=lambda pair: pair[0])


@st.composite
def environments(draw, here: str) -> Environment:
    """Any environment below the folder `here`, which stands for the caller's."""
    asked = draw(mounts)
    return Environment(
        "made",
        None,
        "",
        workdir=draw(st.sampled_from((None, "/tmp", "${HERE}", "/srv/here", "${NEVER:-/srv}"))),
        entrypoint=draw(st.booleans()),
        writable=draw(st.booleans()),
        mounts=tuple(Mount(literal(f"{here}/made/{name}"), literal(f"/made/{name}"), flags) for name, flags in asked),
        env=draw(st.dictionaries(names, values, min_size=10, max_size=30)),
    )


@settings(
    max_examples=int(os.environ.get("RUNNER_LAB_EXAMPLES", "5")),
    database=None,
    phases=[Phase.generate],  # each example starts a container: to make a failing one smaller would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def any_environment(way: Way, squashfs: Path, folder: Path, data: st.DataObject) -> None:
    here = Path(tempfile.mkdtemp(dir=folder))
    environment = replace(data.draw(environments(str(here))), image=way.image or str(squashfs))
    environment_for(Case(""), way, squashfs, here / "made")  # the folders that each caller has
    (here / "home").mkdir()
    (here / "home/mark").write_text("the home\n")
    for mount in environment.mounts:
        Path(expand(mount.source, {}, "mounts")).mkdir(exist_ok=True)
    try:
        found = differences_of(environment, way, here)
    except RunnerError as error:
        assert "cannot use" in error.what and error.fix
        event("refused")
    else:
        if found and "cannot mount" in found[0]:
            event("stopped on the node")
        else:
            assert found == [], repr(environment)[:3000]


@pytest.mark.parametrize(
    "way", [pytest.param(name, marks=marks(name), id=name) for name in WAYS if name not in BY_HAND], indirect=True
)
def test_any_environment_is_as_promised_or_refused(way, look_sqsh, tmp_path):
    any_environment(way, look_sqsh, tmp_path)


def test_the_emitted_script_of_pyxis_is_a_batch_script_too(slurm, look_sqsh, tmp_path):
    environment = environment_of(tmp_path, f'image = "{look_sqsh}"\nworkdir = "/kept"\n')
    script, output = tmp_path / "job.sh", tmp_path / "out"
    script.write_text(emitted(environment, load_site("local"), "pyxis", os.environ)[0])
    words = (
        "sbatch",
        "--parsable",
        f"--output={output}",
        "--nodes=2",
        str(script),
        "sh",
        "-c",
        'echo "$PWD $1"',
        "sh",
        "it's",
    )
    slurm.wait_for(slurm.run(words).stdout.strip(), "COMPLETED")
    assert output.read_text() == "/kept it's\n" * 2
