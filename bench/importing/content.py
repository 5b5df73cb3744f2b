"""The bench's image: six gzip layers of real Debian and PyPI packages, and a twin that differs in the last one."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.importing import layout, packages
from bench.importing.layout import Blob

ROOT = Path(__file__).resolve().parents[2]
EPOCH = 1_700_000_000
LAST_LAYER_BYTES = 50_000_000


@dataclass(frozen=True)
class Content:
    """Makes blobs below `work`, each once; a file beside them notes what was made."""

    work: Path

    @property
    def blobs(self) -> Path:
        """All the bench's layers."""
        return self.work / "blobs"

    def layer(self, name: str, fill: Callable[[Path], None], level: int = 6) -> Blob:
        """The layer `name`; `fill` puts its tree into an empty folder, unless the blob is there already."""
        note = self.work / f"{name}.json"
        if found := layout.load(note):
            return found[0]
        tree = self.work / "trees" / name
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        print(f"making layer {name}", flush=True)
        fill(tree)
        with subprocess.Popen(tar_argv(tree), stdout=subprocess.PIPE) as tar:
            assert tar.stdout is not None
            blob = layout.compress(tar.stdout, self.blobs, level)  # type: ignore[arg-type]
        if tar.returncode != 0:
            raise SystemExit(f"tar ended with {tar.returncode}")
        layout.save([blob], note)
        print(f"  {blob.plain_size / 1e9:.2f} GB, {blob.size / 1e9:.2f} GB as gzip", flush=True)
        return blob

    def tree(self, name: str) -> Path:
        """The folder a layer was made of; unpacked from its blob where it is gone."""
        folder = self.work / "trees" / name
        if not folder.exists():
            folder.mkdir(parents=True)
            blob = layout.load(self.work / f"{name}.json")[0].path(self.blobs)
            run("tar", "-C", str(folder), "-I", "pigz", "-xpf", str(blob))
        return folder

    def remove_trees(self) -> None:
        """Remove the folders that layers were made of; the blobs stay."""
        shutil.rmtree(self.work / "trees", ignore_errors=True)

    def base(self) -> Blob:
        """Debian with Python and a compiler."""
        return self.layer("base", _debian_root)

    def stack(self) -> Blob:
        """The training stack in /opt/stack."""
        return self.layer("stack", lambda tree: _stack(tree, self.tree("base")))

    def more(self) -> Blob:
        """More packages of PyPI in /opt/more."""
        return self.layer("more", _more)

    def debian(self) -> Blob:
        """More packages of Debian."""
        return self.layer("debian", lambda tree: _debian(tree, self.work / "debs"))

    def changes(self) -> Blob:
        """Whiteouts, an opaque folder, and files that replace those below."""
        return self.layer("changes", lambda tree: _changes(tree, self.tree("stack"), self.tree("more")))

    def last(self, seed: int) -> Blob:
        """About 50 MB: code and weights of a project; another seed gives another layer."""
        return self.layer(f"last-{seed}", lambda tree: _project(tree, seed))

    def images(self) -> tuple[Path, Path]:
        """The layouts of the image and of its twin whose last layer differs."""
        lower = (self.base(), self.stack(), self.more(), self.debian(), self.changes())
        one = layout.write(self.work / "image", (*lower, self.last(1)), self.blobs)
        two = layout.write(self.work / "twin", (*lower, self.last(2)), self.blobs)
        self.remove_trees()
        return one, two


def tar_argv(tree: Path) -> tuple[str, ...]:
    """GNU tar of a folder as PAX, sorted, with whole-second times: as builders write layers."""
    form = ("--format=posix", "--pax-option=delete=atime,delete=ctime", "--sort=name", "--numeric-owner")
    return ("tar", "-C", str(tree), *form, "-cf", "-", ".")


def run(*argv: str, **options: object) -> None:
    """A command that must succeed; ends the bench where it does not."""
    if (code := subprocess.run(argv, **options).returncode) != 0:  # type: ignore[call-overload]
        raise SystemExit(f"{' '.join(argv)[:300]} ended with {code}")


def _debian_root(tree: Path) -> None:
    tree.rmdir()
    include = f"--include={','.join(packages.BASE)}"
    run("mmdebstrap", "--variant=minbase", "--mode=root", "--quiet", include, packages.SUITE, str(tree))


def _pip(target: Path, *words: str) -> None:
    chosen = ("--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--no-compile", "--no-deps")
    quiet = ("-qq", "--root-user-action=ignore", "--upgrade")
    run(sys.executable, "-m", "pip", "install", *quiet, "--target", str(target), *chosen, *words)


def _stack(tree: Path, base: Path) -> None:
    target = tree / "opt/stack"
    torch = (sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(tree / "wheels"), packages.TORCH)
    if subprocess.run(torch).returncode != 0:
        run(*torch, "--extra-index-url", packages.TORCH_INDEX)
    lines = (ROOT / "containers/pins/cpu.txt").read_text().splitlines()
    pins = [line for line in lines if "==" in line and line.split("==")[0] not in packages.NOT_FROM_PINS]
    _pip(target, *(str(path) for path in (tree / "wheels").iterdir()))
    shutil.rmtree(tree / "wheels")
    _pip(target, *pins)
    _pip(target, *packages.SCIENCE)
    compile_all = ("python3", "-m", "compileall", "-qq", f"-j{os.cpu_count()}", "/opt/stack")
    inside = ("bwrap", "--bind", str(base), "/", "--dev", "/dev", "--bind", str(target), "/opt/stack")
    subprocess.run((*inside, *compile_all))  # 1 where a file is of a newer Python's syntax: torch ships such
    (base / "opt/stack").rmdir()


def _more(tree: Path) -> None:
    for name in packages.MORE:
        _pip(tree / "opt/more", name)


def _debian(tree: Path, debs: Path) -> None:
    debs.mkdir(exist_ok=True)
    run("apt-get", "download", "-q", *packages.DEBIAN, cwd=debs, stdout=subprocess.DEVNULL)
    for deb in sorted(debs.glob("*.deb")):
        run("dpkg-deb", "-x", str(deb), str(tree))
    shutil.rmtree(debs)


def _changes(tree: Path, stack: Path, more: Path) -> None:
    """Delete a package here and the contents of one there, replace one file in forty of another."""
    below = tree / "opt/stack"
    below.mkdir(parents=True)
    for name in ("tensorboard", "sympy/printing", "matplotlib/mpl-data/sample_data"):
        gone = below / name
        gone.parent.mkdir(parents=True, exist_ok=True)
        gone.with_name(f".wh.{gone.name}").touch()
    opaque = tree / "opt/more/babel"
    opaque.mkdir(parents=True)
    (opaque / ".wh..wh..opq").touch()
    (opaque / "__init__.py").write_text("# emptied\n")
    assert (more / "opt/more/babel").is_dir() and (stack / "opt/stack/tensorboard").is_dir()
    for path in sorted((stack / "opt/stack/transformers").rglob("*.py"))[::40]:
        changed = tree / path.relative_to(stack)
        changed.parent.mkdir(parents=True, exist_ok=True)
        changed.write_bytes(path.read_bytes() + b"# changed\n")


def _project(tree: Path, seed: int) -> None:
    """Weights that hardly compress, and text that does."""
    chance = random.Random(seed)
    weights = tree / "workspace/project/weights"
    weights.mkdir(parents=True)
    for index in range(8):
        (weights / f"part-{index}.bin").write_bytes(chance.randbytes(LAST_LAYER_BYTES // 10))
    words = [f"word{chance.randrange(10**6)}" for _ in range(5000)]
    code = tree / "workspace/project/code"
    code.mkdir()
    for index in range(500):
        (code / f"module_{index}.py").write_text(" ".join(chance.choices(words, k=LAST_LAYER_BYTES // 10 // 5000)))
    for path in (*tree.rglob("*"), tree):
        os.utime(path, (EPOCH, EPOCH), follow_symlinks=False)
