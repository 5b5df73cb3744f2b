"""Fixtures on real parts, golden files, and the account of the parts that tests ran on."""

import json
import os
import re
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.gate import OUTCOMES
from tests.lab import images, parts
from tests.lab.golden import compare
from tests.lab.podman import Podman
from tests.lab.registry import Registry
from tests.lab.slurm import LabError, SlurmLab

# Without byte code, each worker and each of the thousand processes that tests start compiles the same files anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The tests try this checkout, not what the user has set for runner, or the job of a cluster in which they are started.
OF_TESTS = re.compile("RUNNER_(TEST_|LAB_|PYTEST_|(REQUIRE_PARTS|EXAMPLES|KILLS|REPORT_PICTURES)$)")
OF_USERS = re.compile("RUNNER_|EDF_PATH$|(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SACCT)_")
for name in list(os.environ):
    if OF_USERS.match(name) and not OF_TESTS.match(name):
        del os.environ[name]
os.environ["GIT_CONFIG_GLOBAL"] = os.devnull  # no signed commits, hooks or ignored files of the user
os.umask(0o022)

# A shell starts background commands with SIGINT ignored, and children inherit that: the tests of Ctrl-C need it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine under load may take a second for an example: speed is measured in bench/.
# Each run takes the same examples, so that no commit fails for an older fault; `nox -s tests-all` draws new ones.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=not parts.every_tier(),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("tests")

GOLDEN = Path(__file__).parent / "golden"
counts: Counter[str] = Counter()
engines: dict[str, Counter[str]] = {}  # way into a container -> how its tests ended
unexpected_skips: list[str] = []
outcomes: Counter[str] = Counter()
raised = pytest.StashKey[bool]()  # of a test in one of whose phases something was raised
failed: dict[str, bool] = {}  # id of the test -> whether it uses a real part


def need(*names: str) -> None:
    """Skip the test where a part is missing; in .ci/run such a skip is a failure."""
    if absent := parts.missing(names):
        pytest.skip(f"not on this machine: {', '.join(absent)}")


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmLab]:
    """A private Slurm cluster of three nodes with `--environment` and `--container-*`."""
    need(*parts.SLURM, *parts.PLUGINS)
    with SlurmLab() as lab:
        yield lab


@pytest.fixture(scope="session")
def plain_slurm() -> Iterator[SlurmLab]:
    """A private Slurm cluster that knows nothing of containers."""
    need(*parts.SLURM)
    with SlurmLab(plugins=()) as lab:
        yield lab


@pytest.fixture(scope="session")
def registry() -> Iterator[Registry]:
    """An empty registry on 127.0.0.1."""
    need("docker-registry")
    with Registry() as server:
        yield server


@pytest.fixture(scope="session")
def podman(registry: Registry) -> Iterator[Podman]:
    """A podman with an empty storage of its own; it trusts `registry`."""
    need("podman")
    with Podman((registry.address,)) as engine:
        yield engine


@pytest.fixture(scope="session")
def docker_socket(podman: Podman) -> Iterator[str]:
    """The URL of podman's socket, which speaks docker's API."""
    with podman.socket() as url:
        yield url


@pytest.fixture(scope="session")
def busybox_image(podman: Podman) -> str:
    """The name of the busybox image in podman's storage."""
    return images.build_busybox(podman)


@pytest.fixture(scope="session")
def busybox_sqsh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny image as squashfs with enroot's metadata: GREETING in its environment, /srv as workdir."""
    need("mksquashfs", "busybox")
    return images.make_busybox_squashfs(tmp_path_factory.mktemp("images") / "busybox.sqsh")


@pytest.fixture(scope="session")
def python_image(podman: Podman) -> str:
    """The name of a small Debian with Python in podman's storage."""
    need("mmdebstrap")
    return images.import_python(podman)


@pytest.fixture(scope="session")
def python_sqsh() -> Path:
    """A small Debian with Python as squashfs with enroot's metadata; kept between runs."""
    need("mmdebstrap", "tar2sqfs")
    return images.python_squashfs()


@pytest.fixture(scope="session")
def update_golden(pytestconfig: pytest.Config) -> bool:
    """True when golden files are to be written, not compared: `pytest --update-golden`."""
    return bool(pytestconfig.getoption("--update-golden"))


@pytest.fixture
def golden(update_golden: bool) -> Callable[[str, str], None]:
    """golden(NAME, TEXT): the text must be that of tests/golden/NAME."""

    return lambda name, text: compare(GOLDEN / name, text, update_golden)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ from what the code gives now")
    parser.addoption("--quick", action="store_true", help="leave out what needs Slurm, podman, torch or much time")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "uses(*parts): the test runs on these parts, see tests/lab/parts.py")
    config.addinivalue_line("markers", "engine(name): the test enters containers by this engine")
    parts.listen()


# Files that take longest begin first, or the last of them keeps one core busy after the others are done. The quick tier
# leaves them out.
LONGEST = (
    *("jobs/test_sft", "runs/test_training_requeued", "faults/test_faults", "jobs/test_clm", "images/test_pins"),
    *("runs/test_newer_slurm", "images/test_containerfiles", "runs/test_save_signal_real", "jobs/test_micro_batch"),
    *("end_to_end/test_open", "end_to_end/test_topology", "images/test_real_base"),
    *("jobs/test_convert", "end_to_end/test_chain", "jobs/test_metrics", "images/test_import", "jobs/test_generate"),
    *("end_to_end/test_training", "environments/test_equivalence", "jobs/test_world_size", "jobs/test_memory_on_paper"),
    *("jobs/test_deepspeed_presets", "jobs/test_sft_kinds", "runs/test_script_slurm", "jobs/test_token_cache"),
    *("runs/test_script_words", "runs/test_payload", "test_packaging", "runs/test_restart_slurm", "runs/test_restart"),
    *("runs/test_notify", "images/layers/test_tar_fuzz", "images/squashfs/test_data", "test_lab_account"),
    *("images/sources/test_transfer", "images/test_incremental", "runs/test_restart_causes", "end_to_end/test_batch"),
    *("images/test_flatten_model", "runs/trainers/test_progress", "end_to_end/test_batch_pairs"),
    *("runs/test_in_place", "runs/test_spare_nodes_slurm", "runs/test_usage", "runs/trainers/test_real"),
    *("images/test_import_oracle", "jobs/test_disk_full", "cluster/test_schema", "cluster/test_verbs"),
    *("runs/trainers/test_log_decisions", "runs/test_save_signal", "runs/test_report", "test_gate"),
    *("runs/test_restart_stops", "runs/test_spare_nodes", "runs/test_sarus_launch"),
)
NEEDY = (
    *("end_to_end", "faults", "jobs", "remote", "test_lab_slurm"),
    *("runs/test_script_training", "runs/trainers/test_checkpoints"),
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The quick tier does not import what takes long or needs Slurm: importing torch alone takes ten seconds."""
    if not config.getoption("--quick"):
        return None
    name = collection_path.relative_to(Path(__file__).parent).with_suffix("").as_posix()
    return True if name in (*LONGEST, *NEEDY) else None


def is_quick(item: pytest.Item) -> bool:
    """Whether the test belongs to the quick tier: it needs neither Slurm nor a container engine, torch or much time."""
    tests = Path(__file__).parent
    name = item.path.relative_to(tests).with_suffix("").as_posix() if item.path.is_relative_to(tests) else ""
    if name in (*LONGEST, *NEEDY) or name.partition("/")[0] in NEEDY:
        return False
    if any(item.get_closest_marker(marker) for marker in (*parts.MAY_BE_SKIPPED, "uses", "engine")):
        return False
    return not parts.BY_FIXTURE.keys() & set(getattr(item, "fixturenames", ()))


TIERS = {
    name: re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    for name, patterns in tomllib.loads((Path(__file__).parent / "tiers.toml").read_text()).items()
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for tier, pattern in TIERS.items():
            if pattern.search(item.nodeid.removeprefix("tests/")):
                item.add_marker(tier)
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if not is_quick(item)])
        items[:] = filter(is_quick, items)
    ranks = {f"tests/{name}.py": rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    parts.started()
    item.user_properties += [("engine", mark.args[0]) for mark in item.iter_markers("engine")]
    item.user_properties.append(("on parts", not is_quick(item)))
    for marker, name in parts.BY_MARKER.items():
        if item.get_closest_marker(marker):
            need(name)
    for mark in item.iter_markers("uses"):
        need(*mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    lab = getattr(item, "funcargs", {}).get("slurm")
    made = len(lab.containers()) if lab else 0
    try:
        yield
    finally:
        used = set(parts.started())
        used.update(parts.behind_slurm(lab.containers()[made:] if lab else ()))
        for fixture in getattr(item, "fixturenames", ()):
            used.update(parts.BY_FIXTURE.get(fixture, ()))
        for mark in item.iter_markers("uses"):
            used.update(mark.args)
        used.update(name for marker, name in parts.BY_MARKER.items() if item.get_closest_marker(marker))
        item.user_properties.append(("parts", sorted(used)))


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        item.stash[raised] = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """After a failure, a lab that does not answer is started anew: each test behind it would wait for it in vain.

    Only after the test has given back what it changed: with its PATH there may be no sinfo to ask.
    """
    done = yield
    if item.stash.get(raised, False):
        for lab in tuple(SlurmLab.started):
            if not lab.answers():
                with suppress(LabError):  # the tests behind it say so
                    lab.restart()
    return done


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Runs where the account is kept: with pytest-xdist in the controlling process."""
    if report.failed:
        failed[report.nodeid] = bool(dict(report.user_properties).get("on parts"))
    elif report.when == "call" or report.skipped:
        outcomes[report.outcome] += 1
    if report.skipped and not hasattr(report, "wasxfail") and not parts.MAY_BE_SKIPPED & report.keywords.keys():
        reason = report.longreprtext.splitlines()[-1]
        if not parts.may_skip(reason):
            unexpected_skips.append(f"skipped: {report.nodeid}: {reason[:200]}")
    for name, value in report.user_properties:
        if name == "engine" and (report.when == "call" or report.skipped):
            engines.setdefault(str(value), Counter())[report.outcome] += 1
    if report.when == "call" and not report.skipped:
        for name, value in report.user_properties:
            if name == "parts" and isinstance(value, list):
                counts.update(value)


def _complaints(config: pytest.Config) -> list[str]:
    if not os.environ.get(parts.REQUIRE) or hasattr(config, "workerinput") or config.option.collectonly:
        return []
    return [*parts.complaints(counts), *unexpected_skips]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and _complaints(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if OUTCOMES in os.environ and not hasattr(session.config, "workerinput"):
        ended = {"passed": outcomes["passed"], "skipped": outcomes["skipped"], "failed": failed}
        Path(os.environ[OUTCOMES]).write_text(json.dumps({**ended, "complaints": _complaints(session.config)}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.collectonly:
        return
    terminalreporter.section("real parts")
    for line in parts.table(counts):
        terminalreporter.write_line(line)
    if engines:
        terminalreporter.section("engines whose inside was compared with the promise")
    for name, ended in engines.items():
        absent = " (not on this machine)" if not ended["passed"] + ended["failed"] else ""
        terminalreporter.write_line(f"{name}: {ended['passed']} passed, {ended['failed']} failed{absent}")
    for line in _complaints(config):
        terminalreporter.write_line(f"{parts.REQUIRE}: {line}", red=True)
