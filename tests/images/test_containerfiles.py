"""The Containerfiles for GPUs are built for real on a base of NGC's shape; a step that replaces torch fails the build.

The base is a small Debian with what NGC's images have: the entrypoint, PIP_CONSTRAINT with its file, NVIDIA's own torch
and pytorch-triton. What cannot be had here are NVIDIA's torch and a GPU compiler, so the packages are tiny stand-ins
from a local folder, and DeepSpeed's is a source archive whose setup.py demands what the real one needs: torch at build
time, the architectures, the accelerator by name. Megatron-LM is an archive as GitHub makes it of a commit. Amazon's
installer is a script that puts files where the real one does.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from runner.images.recipe import Recipe, load_recipe
from runner.project import Project
from tests.images.standins import write_wheel
from tests.lab.podman import Podman

pytestmark = pytest.mark.uses("podman")

ROOT = Path(__file__).parents[2]
TORCH = "2.4.0a0+f70bd71a48"
BASE = "localhost/lab/ngc:24.06-py3"
INSIDE = "/dev/packages"  # a file system in memory of each build container: the folder leaves no trace in the image
PIP_CONF = f"[global]\nno-index = true\nfind-links = {INSIDE}\n"
BASE_CONTAINERFILE = f"""\
FROM {{python}}
ENV PIP_CONSTRAINT=/etc/pip/constraint.txt PIP_BREAK_SYSTEM_PACKAGES=1 NVIDIA_PYTORCH_VERSION=24.06 \\
    PYTORCH_VERSION={TORCH} NVIDIA_VISIBLE_DEVICES=all \\
    TORCH_CUDA_ARCH_LIST="5.2 6.0 6.1 7.0 7.2 7.5 8.0 8.6 8.7 9.0+PTX"
RUN mkdir -p /etc/pip /opt/nvidia \\
    && printf '%s\\n' numpy==1.24.4 safetensors==0.4.3 torch=={TORCH} '# a comment' > /etc/pip/constraint.txt \\
    && printf '#!/bin/sh\\nexec "$@"\\n' > /opt/nvidia/nvidia_entrypoint.sh \\
    && chmod +x /opt/nvidia/nvidia_entrypoint.sh \\
    && ln -sf python3 /usr/bin/python \\
    && cd {INSIDE} && PIP_CONSTRAINT= python3 $(echo pip-*.whl)/pip install --no-cache-dir --no-index --find-links . \\
        pip setuptools numpy==1.24.4 pytorch-triton transformer-engine torch=={TORCH}
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh"]
"""
# what the smoke test imports from a package, beside the package itself
MODULES: Mapping[str, Mapping[str, str]] = {
    "transformers": {"transformers/__init__.py": "__version__ = '4.57.6'\nclass Trainer: ...\n"},
    "trl": {"trl/__init__.py": "class SFTTrainer: ...\n"},
    "liger-kernel": {"liger_kernel/__init__.py": "", "liger_kernel/transformers.py": ""},
}
REQUIRES = {"transformers": ("torch>=2.2",), "liger-kernel": ("torch", "triton>=2.3.1"), "peft": ("torch>=1.13",)}
DEEPSPEED_SETUP = """
import os
import torch  # fails in an isolated build, as the real one would compile against another torch there
from setuptools import setup

assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0", os.environ["TORCH_CUDA_ARCH_LIST"]
assert os.environ["DS_ACCELERATOR"] == "cuda"
names = ("fused_adam", "cpu_adam", "utils", "evoformer_attn")
ops = {name: os.environ.get("DS_BUILD_" + name.upper()) == "1" for name in names}
with open("deepspeed/git_version_info.py", "w") as file:
    file.write(f"installed_ops = {ops}\\n")
setup(name="deepspeed", version="VERSION", packages=["deepspeed"], install_requires=["torch"])
"""


def write_source(folder: Path, name: str, version: str, files: Mapping[str, str]) -> None:
    with tarfile.open(folder / f"{name}-{version}.tar.gz", "w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))


MEGATRON_SETUP = """
import torch  # as its extension needs the base's packages at build time
from pathlib import Path
from setuptools import setup

Path("megatron/core/datasets/helpers_cpp.py").touch()  # the real one compiles helpers.cpp to this place
setup(name="megatron-core", version="0.19.0", packages=["megatron.core"], install_requires=["torch>=99"])
"""


def write_commit(folder: Path, commit: str, content: str = "") -> None:
    """Write FOLDER/COMMIT.tar.gz, as `git archive` makes it of the commit `content`."""
    files = {"setup.py": MEGATRON_SETUP, "pretrain_gpt.py": "print('pretrain')\n", "megatron/core/__init__.py": ""}
    files |= {"megatron/core/datasets/helpers.cpp": ""}
    path, headers = folder / f"{commit}.tar.gz", {"comment": content or commit}
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT, pax_headers=headers) as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"Megatron-LM-{commit}/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))


def pins(name: str = "ngc-24.06") -> dict[str, str]:
    """Version by name of every package in a pin set; any version where it fixes none."""
    lines = (ROOT / f"containers/pins/{name}.txt").read_text().splitlines()
    words = [line.split("==") for line in lines if line and not line.startswith("#")]
    loose = {"numpy<2": ("numpy", "1.26.4"), "pydantic>=2": ("pydantic", "2.7.1")}
    return dict((name, rest[0]) if rest else loose.get(name, (name, "1.0")) for name, *rest in words)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip in the builds takes everything from: stand-ins, and the real pip and setuptools."""
    folder = tmp_path_factory.mktemp("packages")
    megatron = load_recipe("ngc-megatron", Project(ROOT, ROOT, ROOT)).build_args["MEGATRON"]
    write_commit(folder, megatron)
    write_commit(folder, "0" * 40, megatron)
    for name, version in {*pins().items(), *pins("ngc-megatron-25.09").items(), ("transformer-engine", "2.7.0")}:
        if name != "deepspeed":
            write_wheel(folder, name, version, REQUIRES.get(name, ()), MODULES.get(name))
    write_wheel(folder, "numpy", "1.24.4")
    for version in (TORCH, "2.5.1"):
        parts = {"torch/__init__.py": f"__version__ = '{version}'\n", "torch/utils/__init__.py": ""}
        write_wheel(folder, "torch", version, (), {**parts, "torch/utils/tensorboard.py": ""})
    for name in ("pytorch-triton", "triton"):
        write_wheel(folder, name, "3.0.0", (), {"triton/__init__.py": f"built_as = '{name}'\n"})
    write_wheel(folder, "wants-new-torch", "1.0", ("torch>=2.5",))
    write_wheel(folder, "wants-triton", "1.0", ("triton",))
    setup = DEEPSPEED_SETUP.replace("VERSION", pins()["deepspeed"])
    write_source(folder, "deepspeed", pins()["deepspeed"], {"setup.py": setup, "deepspeed/__init__.py": ""})
    if kept := os.environ.get("RUNNER_TEST_WHEELS"):  # noxfile.py keeps them, so that no index is asked
        for wheel in Path(kept).glob("*.whl"):
            shutil.copy(wheel, folder)
    else:
        argv = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}")
        subprocess.run((*argv, "pip", "setuptools<81"), check=True, capture_output=True)
    (folder / "pip.conf").write_text(PIP_CONF)
    return folder


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("ngc-deepspeed", Project(ROOT, ROOT, ROOT))


@pytest.fixture(scope="module")
def base(podman: Podman, python_image: str, packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of an image of NGC's shape, in podman's storage."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "Containerfile").write_text(BASE_CONTAINERFILE.replace("{python}", python_image))
    done = podman.run("build", *offered(packages), f"--tag={BASE}", str(folder), check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    yield BASE
    podman.run("rmi", "--force", BASE, check=False)


def offered(packages: Path) -> tuple[str, ...]:
    return ("--network=none", "--format=docker", f"--volume={packages}:{INSIDE}:ro")


def context(recipe: Recipe, folder: Path) -> Path:
    """A folder with nothing but what the recipe lists."""
    for name in recipe.context or ():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(("cp", "-r", str(recipe.root / name), str(target)), check=True)
    return folder


def build(
    podman: Podman, recipe: Recipe, folder: Path, packages: Path, text: str = "", **build_args: str
) -> subprocess.CompletedProcess[str]:
    """Build the Containerfile (or `text` in its place) in a folder made by `context`."""
    lines = (text or recipe.containerfile.read_text()).splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if line.startswith("FROM ")) + 1
    lines.insert(at, f"ARG PIP_CONFIG_FILE={INSIDE}/pip.conf\n")
    (folder / "Containerfile").write_text("".join(lines))
    arguments = {**recipe.build_args, "BASE": BASE, **build_args}
    flags = tuple(f"--build-arg={name}={value}" for name, value in arguments.items())
    tag = f"--tag=localhost/lab/{recipe.name}:1"
    return podman.run("build", *offered(packages), *flags, tag, str(folder), check=False)


@pytest.fixture(scope="module")
def image(podman: Podman, base: str, recipe: Recipe, packages: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image as the recipe makes it."""
    done = build(podman, recipe, context(recipe, tmp_path_factory.mktemp("context")), packages)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return "localhost/lab/ngc-deepspeed:1"


def test_it_builds_and_keeps_torch(podman: Podman, image: str) -> None:
    """All packages came in, DeepSpeed has the ops that were asked for, and torch is the base's."""
    check = (
        "import torch, json, deepspeed.git_version_info as g; print(json.dumps([torch.__version__, g.installed_ops]))"
    )
    said = podman.run("run", "--rm", "--network=none", image, "python3", "-c", check).stdout
    assert f'"{TORCH}"' in said
    assert '"fused_adam": true, "cpu_adam": true, "utils": true, "evoformer_attn": false' in said


def test_the_constraint_file_is_edited_consciously(podman: Podman, image: str) -> None:
    """NGC's lines stay, but for what our pins fix; torch and what belongs to it stand there to the letter."""
    run = ("run", "--rm", "--network=none", image)
    lines = podman.run(*run, "cat", "/etc/pip/constraint.txt").stdout.splitlines()
    assert {"numpy==1.24.4", "# a comment", f"torch=={TORCH}", "pytorch-triton==3.0.0", "triton==0"} <= set(lines)
    assert not any(line.startswith("safetensors") for line in lines)
    assert "safetensors==0.4.3" in podman.run(*run, "cat", "/etc/pip/constraint.txt.base").stdout
    installed = podman.run(*run, "cat", "/opt/runner/installed.txt").stdout.splitlines()
    assert {"numpy==1.24.4", f"safetensors=={pins()['safetensors']}", f"transformers=={pins()['transformers']}"} <= set(
        installed
    )


def test_triton_is_still_nvidias(podman: Podman, image: str) -> None:
    """Liger asks for `triton`, which would lie over NGC's pytorch-triton in the same folder."""
    said = podman.run("run", "--rm", "--network=none", image, "python3", "-c", "import triton; print(triton.built_as)")
    assert said.stdout.strip() == "pytorch-triton"


@pytest.mark.parametrize("requirement", ["wants-new-torch", "torch==2.5.1", "wants-triton"])
def test_a_requirement_that_would_replace_torch_fails_the_build(
    podman: Podman, base: str, recipe: Recipe, packages: Path, tmp_path: Path, requirement: str
) -> None:
    """pip itself refuses, and names who asks."""
    folder = context(recipe, tmp_path)
    with (folder / "containers/pins/ngc-24.06.txt").open("a") as file:
        file.write(f"{requirement}\n")
    done = build(podman, recipe, folder, packages)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "conflicting dependencies" in said
    assert requirement.split("==")[0] in said.split("The conflict is caused by:")[1]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("PIP_CONSTRAINT= python3 -m pip install torch==2.5.1", f"torch was {TORCH}, is 2.5.1"),
        ("python3 -m pip uninstall --yes torch", f"torch was {TORCH}, is gone"),
        ("PIP_CONSTRAINT= python3 -m pip install triton", "triton 3.0.0 lies over pytorch-triton"),
    ],
)
def test_a_step_that_goes_behind_pips_back_fails_the_build(
    podman: Podman, base: str, recipe: Recipe, packages: Path, tmp_path: Path, command: str, words: str
) -> None:
    """Where the constraint file is put aside, the check after the step ends the build."""
    text = recipe.containerfile.read_text()
    step = "    && rm /tmp/stack.txt \\\n"
    assert text.count(step) == 1
    done = build(
        podman, recipe, context(recipe, tmp_path), packages, text.replace(step, f"{step}    && {command} \\\n")
    )
    assert done.returncode != 0
    assert words in done.stdout + done.stderr


def test_the_pins_of_another_base_fail_the_build(
    podman: Podman, base: str, recipe: Recipe, packages: Path, tmp_path: Path
) -> None:
    """A pin set fits one torch only; the first step says so, before anything is installed."""
    done = build(podman, recipe, context(recipe, tmp_path), packages, TORCH="2.8.0a0+5228986c39")
    assert done.returncode != 0
    assert f"this base has torch {TORCH}, the pins are for 2.8.0a0+5228986c39" in done.stdout + done.stderr


def test_every_install_step_is_followed_by_the_check() -> None:
    """So that the message names the step that did it."""
    for name, count in (("ngc-deepspeed", 3), ("aws-deepspeed", 3), ("ngc-megatron", 2)):
        text = (ROOT / f"Containerfile.{name}").read_text()
        steps = [step for step in text.split("\nRUN ")[1:] if "pip install" in step.split("\n\n")[0]]
        assert len(steps) == count
        assert all("keep_torch.py check" in step.split("\n\n")[0] for step in steps)


MEGATRON = {"TORCH": TORCH, "MEGATRON_URL": f"file://{INSIDE}"}


@pytest.fixture(scope="module")
def megatron() -> Recipe:
    return load_recipe("ngc-megatron", Project(ROOT, ROOT, ROOT))


def test_the_megatron_image_has_its_programs_at_the_commit(
    podman: Podman, base: str, megatron: Recipe, packages: Path, tmp_path: Path
) -> None:
    """The index builder is compiled, Megatron imports from anywhere, torch and Transformer Engine are the base's."""
    done = build(podman, megatron, context(megatron, tmp_path), packages, **MEGATRON)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"of commit {megatron.build_args['MEGATRON']} in /opt/megatron" in done.stdout
    run = ("run", "--rm", "--network=none", "localhost/lab/ngc-megatron:1")
    assert podman.run(*run, "sh", "-c", "python3 $MEGATRON_HOME/pretrain_gpt.py").stdout == "pretrain\n"
    check = "import megatron.core.datasets.helpers_cpp as one, torch; print(one.__file__, torch.__version__)"
    said = podman.run(*run, "python3", "-c", check).stdout.split()
    assert said == ["/opt/megatron/megatron/core/datasets/helpers_cpp.py", TORCH]
    lines = podman.run(*run, "cat", "/etc/pip/constraint.txt").stdout.splitlines()
    assert {f"torch=={TORCH}", "transformer-engine==2.7.0"} <= set(lines)


@pytest.mark.parametrize(
    ("build_args", "words"),
    [
        ({"MEGATRON": "0" * 40}, f"{'0' * 40}.tar.gz contains "),
        ({"MEGATRON": "1" * 40}, "No such file or directory"),
        ({"TORCH": "2.9.0a0+50eac811a6"}, f"this base has torch {TORCH}, the pins are for 2.9.0a0+50eac811a6"),
    ],
)
def test_another_commit_or_torch_fails_the_build(
    podman: Podman, base: str, megatron: Recipe, packages: Path, tmp_path: Path, build_args: dict[str, str], words: str
) -> None:
    done = build(podman, megatron, context(megatron, tmp_path), packages, **{**MEGATRON, **build_args})
    assert done.returncode != 0
    assert words in done.stdout + done.stderr


def test_a_base_without_transformer_engine_fails_the_build(
    podman: Podman, base: str, megatron: Recipe, packages: Path, tmp_path: Path
) -> None:
    text = megatron.containerfile.read_text()
    step = "# See Containerfile.ngc-deepspeed"
    changed = text.replace(step, f"RUN python3 -m pip uninstall --yes transformer-engine\n{step}", 1)
    done = build(podman, megatron, context(megatron, tmp_path), packages, changed, **MEGATRON)
    assert done.returncode != 0
    assert "Package(s) not found: transformer-engine" in done.stdout + done.stderr


# which options it got, and files where Amazon's installer of 2026 puts them
EFA_INSTALLER = """#!/bin/bash
printf '%s\\n' "$*" > /opt/efa-options
mkdir -p /opt/amazon/efa/lib /opt/amazon/ofi-nccl/lib
cp "$(ldconfig -p | awk '/libz.so.1 /{print $NF; exit}')" /opt/amazon/ofi-nccl/lib/NAME
"""


def write_installer(folder: Path, name: str) -> str:
    """Write an installer that installs the plug-in as NAME; return its checksum."""
    path = folder / "aws-efa-installer-1.49.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        text = EFA_INSTALLER.replace("NAME", name).encode()
        entry = tarfile.TarInfo("aws-efa-installer/efa_installer.sh")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def aws() -> Recipe:
    return load_recipe("aws-deepspeed", Project(ROOT, ROOT, ROOT))


def efa(checksum: str) -> dict[str, str]:
    return {"TORCH": TORCH, "PINS": "containers/pins/ngc-24.06.txt", "EFA_URL": f"file://{INSIDE}",
            "EFA_SHA256": checksum}  # fmt: skip


def test_the_image_for_aws_has_the_plugin_that_nccl_loads(
    podman: Podman, base: str, aws: Recipe, packages: Path, tmp_path: Path
) -> None:
    """The base's own EFA packages are gone, and NCCL is told the path of the new plug-in."""
    checksum = write_installer(packages, "libnccl-net-ofi.so")
    text = aws.containerfile.read_text()
    step = "# EFA before everything else"
    old = "RUN mkdir -p /opt/amazon/aws-ofi-nccl/lib && echo /old > /etc/ld.so.conf.d/aws-ofi-nccl.conf\n"
    done = build(podman, aws, context(aws, tmp_path), packages, text.replace(step, old + step), **efa(checksum))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    script = "ls $NCCL_NET_PLUGIN; cat /opt/efa-options; ls -d /opt/amazon/* /etc/ld.so.conf.d/aws-ofi-nccl.conf"
    run = ("run", "--rm", "--network=none", "localhost/lab/aws-deepspeed:1", "sh", "-c", script)
    assert podman.run(*run, check=False).stdout.splitlines() == [
        "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so",
        "-y --build-ngc --skip-kmod --skip-limit-conf --skip-mpi --no-verify",
        *("/opt/amazon/efa", "/opt/amazon/ofi-nccl"),
    ]


@pytest.mark.parametrize(
    ("name", "checksum", "words"),
    [
        ("libnccl-net-ofi.so", "0" * 64, "not " + "0" * 64),
        ("libnccl-net-other.so", "", "it installed: /opt/amazon/ofi-nccl/lib/libnccl-net-other.so"),
    ],
)
def test_another_installer_fails_the_build(
    podman: Podman, base: str, aws: Recipe, packages: Path, tmp_path: Path, name: str, checksum: str, words: str
) -> None:
    right = write_installer(packages, name)
    done = build(podman, aws, context(aws, tmp_path), packages, **efa(checksum or right))
    assert done.returncode != 0
    assert words in done.stdout + done.stderr
