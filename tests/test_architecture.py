"""The rules that keep the house in order, read from the source itself."""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "runner"
JOBS = ROOT / "jobs"

# who may import whom: each floor only itself and those after it
FLOORS = (
    *("api", "cli", "commands", "remote", "cluster", "runs", "doctor and memory", "environments", "images"),
    *("detection", "site", "texts", "machine", "errors"),
)
TOGETHER = {
    **dict.fromkeys(("doctor", "memory"), "doctor and memory"),
    **dict.fromkeys(("detection", "cluster_facts"), "detection"),
    **dict.fromkeys(("site", "site_files"), "site"),
    **dict.fromkeys(("located_toml", "expansion", "bash", "quoting", "project", "option_grammar"), "texts"),
}
# the packages that may start processes, open sockets, and write files; all others ask machine/
DOORS = ("machine", "images/build/steps", "images/importer", "images/sources", "images/squashfs")
SLOW = {"jinja2", "yaml", "tomlkit", "docker", "rich", "urllib3", "requests", "certifi"}
TRAINING = {"torch", "deepspeed", "transformers", "trl", "datasets", "accelerate", "peft"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def floor_of(module: str) -> str | None:
    """The floor of a dotted module name of runner; None for the package itself and `__main__`."""
    parts = module.split(".")
    if len(parts) < 2 or parts[1] == "__main__":
        return None
    return TOGETHER.get(parts[1], parts[1])


@cache
def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """The dotted names that a file imports, those under `if TYPE_CHECKING:` left out."""
    found: set[str] = set()

    def visit(node: ast.AST, inside_function: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import) and not (top_only and inside_function):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module and not (top_only and inside_function):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        inside = inside_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree_of(path), False)
    return found


def test_imports_point_downwards() -> None:
    """A module imports its own floor and those below it, never one above."""
    for path in modules():
        own = floor_of(name_of(path))
        if own is None:
            continue
        for imported in imports(path):
            other = floor_of(imported) if imported.startswith("runner.") else None
            if other in FLOORS:
                above = FLOORS.index(other) < FLOORS.index(own)
                assert not above, f"{name_of(path)} imports {imported}, which lies above it"


def test_every_module_has_a_floor() -> None:
    """A new room at the top of runner is given its place in this test first."""
    rooms = {floor_of(name_of(path)) for path in modules()} - {None}
    assert rooms <= set(FLOORS)


def test_no_import_cycles() -> None:
    """Following imports never leads back, those inside functions included."""
    names = {name_of(path): path for path in modules()}
    arrows = {
        name: {found for found in imports(path) if found in names and found != name} for name, path in names.items()
    }
    # a package's __init__ that gathers its own modules is no cycle with them unless they import the package's names
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name in done:
            return
        for other in sorted(arrows[name]):
            walk(other, (*trail, name))
        done.add(name)

    for name in sorted(names):
        walk(name, ())


def test_the_rooms_of_runs_lie_one_above_the_other() -> None:
    """Its folders, and the nouns and verbs beside them, import each other in no circle."""
    arrows: dict[str, set[str]] = {}
    for path in modules():
        if path.is_relative_to(SOURCE / "runs"):
            room = path.relative_to(SOURCE / "runs").parts[0].removesuffix(".py")
            found = {name.split(".")[2] for name in imports(path) if name.startswith("runner.runs.")}
            arrows.setdefault(room, set()).update(found - {room})
    TopologicalSorter(arrows).prepare()  # raises CycleError, which names the circle


WRITES = {
    *("write_text", "write_bytes", "unlink", "chmod", "rmdir", "rmtree", "symlink_to", "hardlink_to"),
    *("NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory", "mkstemp", "mkdtemp"),
}
STARTS = {"os.system", "os.popen", "os.execvp", "os.spawnvp"}


def opens_for_writing(node: ast.Call) -> bool:
    """Whether a call is open(...) or path.open(...) with a mode that writes."""
    if ast.unparse(node.func).rpartition(".")[2] != "open":
        return False
    words = [*node.args, *(each.value for each in node.keywords)]
    modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return any(len(mode) <= 3 and set(mode) & set("wax+") for mode in modes)


def test_only_the_doors_touch_the_machine() -> None:
    """Only machine/ and the named byte pumps of images/ use subprocess and sockets, or write."""
    for path in modules():
        place = path.relative_to(SOURCE).as_posix()
        if place.startswith(DOORS):
            continue
        assert not imports(path) & {"subprocess", "socket", "pty", "fcntl"}, place
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                call = ast.unparse(node.func)
                where = f"{place}:{node.lineno} {call}"
                assert call.rpartition(".")[2] not in WRITES, where
                assert call not in STARTS and not opens_for_writing(node), where


def test_only_commands_print() -> None:
    """print() and sys.stdout belong to cli.py and commands/."""
    for path in modules():
        place = path.relative_to(SOURCE).as_posix()
        if place == "cli.py" or place.startswith("commands/"):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{place}:{node.lineno} prints"
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in {"sys.stdout", "sys.stderr.write"}, f"{place}:{node.lineno}"


def test_slow_imports_happen_inside_functions() -> None:
    """jinja2, tomlkit, docker and rich are imported where they are used; the training stack never."""
    for path in modules():
        assert not {name.split(".")[0] for name in imports(path, top_only=True)} & SLOW, path
        assert not {name.split(".")[0] for name in imports(path)} & TRAINING, path


def test_engines_and_schedulers_do_not_know_each_other() -> None:
    """They meet as data (an Attachment); payload/ never imports runner."""
    for path in modules():
        place = path.relative_to(SOURCE).as_posix()
        if place.startswith("environments/engines/"):
            assert not any("schedulers" in name for name in imports(path)), place
        if place.startswith("runs/schedulers/"):
            assert not any("engines" in name for name in imports(path)), place


# where the name of an engine is compared: `choose` and the modules of the engines; the lowest module, which cannot ask
# them; and what builds images or reads other people's command lines, where podman and docker are something else
COMPARES_ENGINES = (
    *(
        "environments/engines/",
        "environments/environment.py",
        "images/",
        "commands/build.py",
        "runs/adopt/containers.py",
    ),
)


def test_what_differs_between_engines_lies_in_their_modules() -> None:
    """Others ask `engine_of(name)` for a fact."""
    from runner.environments.engines import ENGINES

    for path in modules():
        place = path.relative_to(SOURCE).as_posix()
        if place.startswith(COMPARES_ENGINES):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Compare):
                sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
                compares = any(side.endswith("engine") or side.startswith("choose(") for side in sides)
                constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                assert not compares or not constants & set(ENGINES), f"{place}:{node.lineno}"


def test_each_engine_is_one_module_and_one_row() -> None:
    from runner.environments.engines import ENGINES, engine_of

    folder = SOURCE / "environments/engines"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__", "engine", "shared"} == set(ENGINES)
    for name in ENGINES:
        assert engine_of(name).name == name


# where a scheduler is compared: what `local` means, and two schedulers that must be the same one
COMPARES_SCHEDULERS = {"site.py", "runs/run.py", "runs/after.py", "commands/env_check.py"}


def test_what_differs_between_schedulers_lies_in_their_modules() -> None:
    """Others ask `scheduler_of(name)`, or whether a site or a run `is_local`."""
    for path in modules():
        place = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Compare) and not place.startswith("runs/schedulers/"):
                sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
                compares = any(side.endswith((".scheduler", "['scheduler']", "get('scheduler')")) for side in sides)
                assert not compares or place in COMPARES_SCHEDULERS, f"{place}:{node.lineno}"


def test_the_schedulers_of_sites_are_those_that_there_are() -> None:
    from runner.runs.schedulers.scheduler import SCHEDULERS
    from runner.site_files import _WORDS

    assert set(_WORDS["scheduler"]) == set(SCHEDULERS)


def test_jobs_never_import_runner_and_shadow_no_package() -> None:
    """Jobs run where runner is not installed, on any Python path."""
    for path in sorted(JOBS.rglob("*.py")):
        found = {name.split(".")[0] for name in imports(path)}
        assert "runner" not in found, path
    for path in [*JOBS.glob("*.py"), *{path.parent for path in JOBS.glob("*/*.py")}]:
        assert path.stem not in TRAINING | SLOW | set(sys.stdlib_module_names), path
