"""The sandbox shows the GPUs and network cards of a node. The devices, the driver and its tools are stand-ins.

Each test has its own /dev, /run and /etc: it runs in a namespace in which it seems to be root.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

import runner.environments.engines
from tests.environments.inside import environment_of, prepared

pytestmark = pytest.mark.uses("squashfuse", "/dev/fuse", "bubblewrap", "unsquashfs")

ENGINES = Path(runner.environments.engines.__file__).parent
LIB = "/usr/lib/x86_64-linux-gnu"
# as `nvidia-ctk cdi generate` of 1.18 writes it, without graphics; HOST is the folder of the driver on this machine
SPEC = """\
---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
    - name: "0"
      containerEdits:
        deviceNodes:
            - path: /dev/nvidia0
    - name: GPU-b1028956-cfa2-0990-bf4a-5da9abb51763
      containerEdits:
        deviceNodes:
            - path: /dev/nvidia1
    - name: all
      containerEdits:
        deviceNodes:
            - path: /dev/nvidia0
            - path: /dev/nvidia1
containerEdits:
    env:
        - NVIDIA_VISIBLE_DEVICES=void
    deviceNodes:
        - path: /dev/nvidiactl
        - path: /dev/nvidia-uvm
    hooks:
        - hookName: createContainer
          path: /usr/bin/nvidia-cdi-hook
          args:
            - nvidia-cdi-hook
            - create-symlinks
            - --link
            - libcuda.so.1::LIB/libcuda.so
          env:
            - NVIDIA_CTK_DEBUG=false
        - hookName: createContainer
          path: /usr/bin/nvidia-cdi-hook
          args:
            - nvidia-cdi-hook
            - enable-cuda-compat
            - --host-driver-version=580.65.06
        - hookName: createContainer
          path: /usr/bin/nvidia-cdi-hook
          args:
            - nvidia-cdi-hook
            - update-ldcache
            - --folder
            - LIB
    mounts:
        - hostPath: HOST/libcuda.so.580.65.06
          containerPath: LIB/libcuda.so.580.65.06
          options:
            - ro
            - nosuid
            - nodev
            - rbind
        - hostPath: HOST/nvidia-smi
          containerPath: /usr/bin/nvidia-smi
          options:
            - ro
        - hostPath: /run/nvidia-persistenced/socket
          containerPath: /run/nvidia-persistenced/socket
          options:
            - ro
            - noexec
"""
# its private /dev and /run: device nodes are /dev/null under other names
PREPARE = """\
set -e
folder=$1; shift
mkdir -p "$folder/dev" "$folder/etc/upper" "$folder/etc/work"
mount -t tmpfs -o mode=0755 dev "$folder/dev"
cd "$folder/dev"
mkdir pts shm infiniband dri
for name in null zero full random urandom tty fuse; do touch $name; mount --bind /dev/$name $name; done
ln -s /proc/self/fd fd
for name in $NODES; do touch $name; mount --bind /dev/null $name; done
mount --rbind "$folder/dev" /dev
mount -t tmpfs run /run
mkdir /run/cdi
mount -t tmpfs etc "$folder/etc"
mkdir "$folder/etc/upper" "$folder/etc/work"
mount -t overlay -o "lowerdir=/etc,upperdir=$folder/etc/upper,workdir=$folder/etc/work,userxattr" etc /etc
mkdir -p /etc/cdi
cp -r "$folder/cdi/." / 2> /dev/null || true
cd "$folder"
if [ -d "$folder/proc" ]; then mount --bind "$folder/proc" /proc/driver; fi
PATH=$folder/bin:$PATH exec "$@"
"""
GPUS = "nvidiactl nvidia-uvm nvidia0 nvidia1"


class Node:
    """A node with stand-ins. `run` enters an image on it."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder, self.image, self.host = folder, image, folder / "host"
        for name in ("bin", "host", "cdi"):
            (folder / name).mkdir()
        for link in ("libcuda.so.1", "libcuda.so"):
            (self.host / link).symlink_to("libcuda.so.580.65.06")
        (self.host / "libcuda.so.580.65.06").write_text("the driver\n")
        self.program("nvidia-smi", "echo smi")
        (folder / "bin/nvidia-smi").rename(self.host / "nvidia-smi")
        self.program("ldconfig", "echo '0 libs found in cache'")

    def spec(self, text: str = SPEC) -> str:
        return text.replace("HOST", str(self.host)).replace("LIB", LIB)

    def cdi(self, path: str, text: str) -> None:
        file = self.folder / "cdi" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run(
        self, script: str, edf: str = "", nodes: str = GPUS, before: Sequence[str] = (), **environ: str
    ) -> subprocess.CompletedProcess[str]:
        text = f'image = "{self.image}"\n{edf}'
        prepared(environment_of(self.folder, text), "sandbox", self.folder / "run")
        return self.command(
            *(*before, "bash", str(self.folder / "run/payload/sandbox.sh"), "sh", "-c", script), nodes=nodes, **environ
        )

    def command(self, *command: str, nodes: str = GPUS, **environ: str) -> subprocess.CompletedProcess[str]:
        """The command on the node, without a container."""
        enter = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")
        words = (*enter, "bash", "-c", PREPARE, "prepare", str(self.folder), *command)
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {"PATH": path, "TMPDIR": str(self.folder), "NODES": nodes, **environ}
        return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=60, check=False)

    def lines(self, *words: str, **options: object) -> list[str]:
        done = self.run(*words, **options)  # type: ignore[arg-type]
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
        return done.stdout.splitlines()


@pytest.fixture
def node(tmp_path: Path, busybox_sqsh: Path) -> Iterator[Node]:
    return Node(tmp_path, busybox_sqsh)


LOOK = f"cd {LIB} && cat libcuda.so.580.65.06 libcuda.so.1 libcuda.so && nvidia-smi && echo $NVIDIA_VISIBLE_DEVICES"
SEEN = ["the driver", "the driver", "the driver", "smi", "void"]


def as_json(text: str) -> str:
    return json.dumps(yaml.safe_load(text), indent=2)


def as_dumped_yaml(text: str) -> str:
    """Keys in alphabetical order, and lists in the column of their key, as older versions of nvidia-ctk write them."""
    return yaml.safe_dump(yaml.safe_load(text))


def as_flow(text: str) -> str:
    return yaml.safe_dump(yaml.safe_load(text), default_flow_style=None)


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("etc/cdi/nvidia.yaml", str),
        ("run/cdi/nvidia.yaml", as_dumped_yaml),
        ("run/cdi/nvidia.json", as_json),
        ("etc/cdi/nvidia.yaml", as_flow),
    ],
)
def test_a_cdi_file_brings_the_driver(node: Node, path: str, written: Callable[[str], str]) -> None:
    node.cdi(path, written(node.spec()))
    also = "; cat $LD_LIBRARY_PATH/libcuda.so.1; echo $LD_LIBRARY_PATH"
    assert node.lines(LOOK + also) == [*SEEN, "the driver", "/usr/local/nvidia/lib64"]


def test_an_ordinary_user_gets_the_driver_too(node: Node) -> None:
    """The sandbox makes two more user namespaces: in the one it mounts, in the other the user has the own id again."""
    node.cdi("etc/cdi/nvidia.yaml", node.spec())
    ordinary = ("unshare", "--user", "--map-user=1234", "--map-group=1234")
    edf = '[env]\nNVIDIA_VISIBLE_DEVICES = "0"\n'
    done = node.run(f"{LOOK}; id -u; ls /dev/nvidia?; echo > /dev/nvidia0", edf, before=ordinary)
    assert done.stdout.splitlines() == [*SEEN, "1234", "/dev/nvidia0"], done.stderr
    assert done.returncode == 0


def test_every_awk_reads_a_file_alike(node: Node) -> None:
    """As many lines as the specification asks for."""
    (node.folder / "spec").write_text(node.spec())
    for program in (("mawk",), ("busybox", "awk"), ("awk",)):
        words = (*program, "-v", "wanted=0", "-f", str(ENGINES / "cdi.awk"), str(node.folder / "spec"))
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [
            "env\tNVIDIA_VISIBLE_DEVICES=void",
            f"link\tlibcuda.so.1\t{LIB}/libcuda.so",
            "compat\t580.65.06",
            *(f"node\t{path}\t{path}" for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")),
            f"mount\t{node.host}/libcuda.so.580.65.06\t{LIB}/libcuda.so.580.65.06",
            f"mount\t{node.host}/nvidia-smi\t/usr/bin/nvidia-smi",
            *["mount\t/run/nvidia-persistenced/socket\t/run/nvidia-persistenced/socket"],
        ]


def test_a_cdi_file_of_another_kind_is_not_used(node: Node) -> None:
    node.cdi("run/cdi/a.json", '{"cdiVersion": "0.6.0", "kind": "intel.com/gpu", "devices": []}')
    node.cdi("run/cdi/b.yaml", node.spec())
    assert node.lines(LOOK) == SEEN


def test_nvidia_ctk_is_asked_where_there_is_no_file(node: Node) -> None:
    (node.folder / "spec").write_text(node.spec())
    node.program("nvidia-ctk", f'[ "$*" = "cdi generate" ] && cat {node.folder}/spec; echo level=info >&2')
    assert node.lines(LOOK) == SEEN


LDCONFIG = """\
4 libs found in cache `/etc/ld.so.cache'
\tlibz.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libz.so.1
\tlibcuda.so.1 (libc6) => /usr/lib32/libcuda.so.1
\tlibcuda.so.1 (libc6,x86-64) => HOST/libcuda.so.1
\tlibcuda.so (libc6,x86-64) => HOST/libcuda.so
"""


def with_ldconfig(node: Node) -> None:
    kind = (
        "x86-64" if subprocess.run(("uname", "-m"), capture_output=True, text=True).stdout == "x86_64\n" else "AArch64"
    )
    (node.folder / "list").write_text(LDCONFIG.replace("HOST", str(node.host)).replace("x86-64", kind))
    node.program("ldconfig", f"cat {node.folder}/list")
    (node.folder / "bin/nvidia-smi").symlink_to(node.host / "nvidia-smi")


def test_the_loaders_list_is_the_last_resort(node: Node) -> None:
    with_ldconfig(node)
    script = "cat $LD_LIBRARY_PATH/libcuda.so.1 $LD_LIBRARY_PATH/libcuda.so; nvidia-smi; ls $LD_LIBRARY_PATH"
    assert node.lines(script) == ["the driver", "the driver", "smi", "libcuda.so", "libcuda.so.1"]


def test_a_file_from_before_the_last_driver_is_reported_and_not_used(node: Node) -> None:
    node.cdi("etc/cdi/nvidia.yaml", node.spec().replace("580.65.06", "570.1"))
    with_ldconfig(node)
    done = node.run("cat $LD_LIBRARY_PATH/libcuda.so.1")
    assert done.stdout == "the driver\n"
    assert "warning: /etc/cdi/nvidia.yaml does not fit the driver of" in done.stderr
    assert f"because: it names {node.host}/libcuda.so.570.1, which does not exist" in done.stderr


def test_a_driver_that_cannot_be_found_is_reported(node: Node) -> None:
    done = node.run("echo started")
    assert (done.returncode, done.stdout) == (0, "started\n")
    assert "programs in the container cannot use the GPUs of" in done.stderr
    assert node.run("true", SLURM_LOCALID="1").stderr == ""  # once per node


DEVICES = "cd /dev && ls -d nvidia* 2> /dev/null; test -c null && test -d shm && ls -d infiniband"


@pytest.mark.parametrize(
    ("visible", "edf", "seen"),
    [
        ("all", "", ["nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl"]),
        ("", "", ["nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl"]),
        ("0", "", ["nvidia-uvm", "nvidia0", "nvidiactl"]),
        ("GPU-b1028956-cfa2-0990-bf4a-5da9abb51763", "", ["nvidia-uvm", "nvidia1", "nvidiactl"]),
        ("nvidia.com/gpu=0", "", ["nvidia-uvm", "nvidia0", "nvidiactl"]),
        ("none", "", ["nvidia-uvm", "nvidiactl"]),
        ("all", 'devices = ["nvidia.com/gpu=0"]\n', ["nvidia-uvm", "nvidia0", "nvidiactl"]),
        ("all", '[env]\nNVIDIA_VISIBLE_DEVICES = "0"\n', ["nvidia-uvm", "nvidia0", "nvidiactl"]),
    ],
)
def test_the_variable_of_nvidias_toolkit_selects_gpus(node: Node, visible: str, edf: str, seen: list[str]) -> None:
    node.cdi("etc/cdi/nvidia.yaml", node.spec())
    options = {"NVIDIA_VISIBLE_DEVICES": visible} if visible else {}
    script = f"{DEVICES}; cat {LIB}/libcuda.so.1; echo $CUDA_VISIBLE_DEVICES"
    assert node.lines(script, edf, CUDA_VISIBLE_DEVICES="1,0", **options) == [*seen, "infiniband", "the driver", "1,0"]


def test_void_means_neither_the_gpus_nor_the_driver(node: Node) -> None:
    node.cdi("etc/cdi/nvidia.yaml", node.spec())
    script = f"{DEVICES}; ls {LIB} 2> /dev/null; echo ${{LD_LIBRARY_PATH-unset}}"
    assert node.lines(script, NVIDIA_VISIBLE_DEVICES="void") == ["nvidia-uvm", "nvidiactl", "infiniband", "unset"]


@pytest.mark.parametrize("source", ["file", "ldconfig"])
def test_a_gpu_that_the_node_lacks_ends_the_run_with_those_that_it_has(node: Node, source: str) -> None:
    with_ldconfig(node)
    if source == "file":
        node.cdi("etc/cdi/nvidia.yaml", node.spec())
    done = node.run("true", NVIDIA_VISIBLE_DEVICES="7")
    assert done.returncode == 1
    assert re.search(
        r"runner: .* has no GPU 7\n  because: (/etc/cdi/nvidia.yaml describes: 0, GPU-|it has: none)", done.stderr
    )


def test_an_index_counts_the_gpus_by_their_pci_address(node: Node) -> None:
    with_ldconfig(node)
    for address, minor in (("0000:07:00.0", 1), ("0000:47:00.0", 0)):
        file = node.folder / f"proc/nvidia/gpus/{address}/information"
        file.parent.mkdir(parents=True)
        file.write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\n")
    # a new /proc would have no stand-ins
    node.program("unshare", 'case " $* " in *" --mount-proc "*) exit 1 ;; esac; exec /usr/bin/unshare "$@"')
    for visible in ("0", "GPU-1"):
        assert node.lines(DEVICES, NVIDIA_VISIBLE_DEVICES=visible)[1] == "nvidia1"
        assert "nvidia0" not in node.lines(DEVICES, NVIDIA_VISIBLE_DEVICES=visible)


def test_gpus_that_are_asked_for_on_a_node_without_any_end_the_run(node: Node) -> None:
    done = node.run("true", 'devices = ["nvidia.com/gpu=all"]\n', nodes="")
    assert done.returncode == 1
    assert "has no NVIDIA GPU\n" in done.stderr


def test_a_device_with_another_path_on_the_host(node: Node) -> None:
    text = node.spec().replace(
        "- path: /dev/nvidia0\n    - name: GPU",
        "- path: /dev/nvidia5\n              hostPath: /dev/nvidia0\n    - name: GPU",
    )
    node.cdi("etc/cdi/nvidia.yaml", text)
    assert node.lines(DEVICES, NVIDIA_VISIBLE_DEVICES="0") == ["nvidia-uvm", "nvidia5", "nvidiactl", "infiniband"]


def test_the_driver_comes_after_the_libraries_of_the_edf(node: Node) -> None:
    node.cdi("etc/cdi/nvidia.yaml", node.spec())
    edf = '[env]\nLD_LIBRARY_PATH = "/opt/own"\n'
    assert node.lines("echo $LD_LIBRARY_PATH", edf) == ["/opt/own:/usr/local/nvidia/lib64"]


def test_without_an_overlay_the_driver_lies_in_tmp(node: Node) -> None:
    node.cdi("etc/cdi/nvidia.yaml", node.spec())
    node.program("mount", '[ "$4" != overlay ] && [ "$2" != overlay ] || exit 1; exec /usr/bin/mount "$@"')
    node.program("fuse-overlayfs", "exit 1")
    done = node.run("cat $LD_LIBRARY_PATH/libcuda.so.1; nvidia-smi; echo $LD_LIBRARY_PATH", "writable = false\n")
    assert done.stdout.splitlines() == ["the driver", "smi", "/tmp/.nvidia/lib64"], done.stderr


def test_locked_memory_is_checked_where_there_is_a_fast_network(node: Node) -> None:
    script = "ulimit -l; ls /dev/infiniband /dev/cxi0 2> /dev/null"
    limited = ("bash", "-c", 'ulimit -l 64; exec "$@"', "limited")
    done = node.run(script, nodes="infiniband/uverbs0 cxi0 kfd", before=limited)
    assert sorted(done.stdout.split()) == ["/dev/cxi0", "/dev/infiniband:", "64", "uverbs0"]
    assert "this job may lock only 64 KiB of memory" in done.stderr
    assert "try:     ask an admin to set LimitMEMLOCK=infinity" in done.stderr
    assert node.run(script, nodes="", before=limited).stderr == ""


def test_the_devices_of_amds_gpus_are_there(node: Node) -> None:
    """ROCm's user libraries are in the image, so the devices are enough; NVIDIA's driver is not looked for."""
    look = "ls -d /dev/kfd /dev/dri/* && echo $ROCR_VISIBLE_DEVICES"
    node.cdi("etc/cdi/nvidia.yaml", node.spec())
    options = {"nodes": "kfd dri/renderD128 dri/renderD129", "ROCR_VISIBLE_DEVICES": "1"}
    devices = ["/dev/dri/renderD128", "/dev/dri/renderD129", "/dev/kfd"]
    assert node.lines(f"{look}; ls {LIB}/libcuda* 2> /dev/null || true", **options) == [*devices, "1"]


def test_the_soft_limit_of_locked_memory_is_raised(node: Node) -> None:
    soft = ("bash", "-c", 'ulimit -Sl 64; ulimit -Hl 128; exec "$@"', "soft")
    assert node.run("ulimit -l", nodes="", before=soft).stdout == "128\n"


def test_a_program_loads_the_driver_by_its_name(tmp_path: Path, python_sqsh: Path) -> None:
    """The stand-in is a real library here, under a path that the image's loader does not know."""
    node = Node(tmp_path, python_sqsh)
    listed = subprocess.run(("/sbin/ldconfig", "-p"), capture_output=True, text=True, check=True).stdout
    library = next(line.split()[-1] for line in listed.splitlines() if line.split()[0] == "libz.so.1")
    (node.host / "libcuda.so.580.65.06").write_bytes(Path(library).read_bytes())
    node.cdi("etc/cdi/nvidia.yaml", node.spec().replace(LIB, "/opt/driver"))
    script = "python3 -c 'import ctypes; print(ctypes.CDLL(\"libcuda.so.1\").zlibVersion.__name__)'"
    assert node.lines(script) == ["zlibVersion"]


COMPAT = "usr/local/cuda-13.0/compat/libcuda.so.585.1"


@pytest.mark.uses("mksquashfs")
@pytest.mark.parametrize(
    ("driver", "first"), [("580.65.06", "/usr/local/cuda-13.0/compat"), ("590.1", "/usr/local/nvidia/lib64")]
)
def test_the_compatibility_libraries_of_an_image_are_used_if_they_are_newer(
    tmp_path: Path, busybox_sqsh: Path, driver: str, first: str
) -> None:
    root = tmp_path / "root"
    subprocess.run(("unsquashfs", "-quiet", "-no-progress", "-d", root, busybox_sqsh), check=True, capture_output=True)
    (root / COMPAT).parent.mkdir(parents=True)
    (root / COMPAT).touch()
    subprocess.run(("mksquashfs", root, tmp_path / "it.sqsh", "-quiet", "-no-progress", "-all-root"), check=True)
    node = Node(tmp_path, tmp_path / "it.sqsh")
    text = node.spec().replace("host-driver-version=580.65.06", f"host-driver-version={driver}")
    node.cdi("etc/cdi/nvidia.yaml", text)
    assert node.lines("echo ${LD_LIBRARY_PATH%%:*}") == [first]


@pytest.mark.parametrize(
    ("stand_in", "verdict", "words"),
    [
        ("none", "ok", "--engine sandbox runs images on this machine, which has no NVIDIA GPU"),
        ("file", "ok", ", with NVIDIA's driver from /etc/cdi/nvidia.yaml"),
        ("nvidia-ctk", "ok", ", with NVIDIA's driver from nvidia-ctk cdi generate"),
        ("ldconfig", "ok", ", with NVIDIA's driver from ldconfig -p"),
        ("gpus", "missing", ", but not with its GPUs: no CDI file fits"),
        ("bwrap", "missing", "images cannot run without another engine: this user may not create namespaces"),
    ],
)
def test_doctor_says_whether_a_cluster_without_a_container_plugin_can_run_images(
    node: Node, stand_in: str, verdict: str, words: str
) -> None:
    if stand_in == "file":
        node.cdi("etc/cdi/nvidia.yaml", node.spec())
    if stand_in == "nvidia-ctk":
        node.program("nvidia-ctk", "exit 0")
    if stand_in == "ldconfig":
        with_ldconfig(node)
    if stand_in == "bwrap":
        node.program("unshare", "exit 1")
    nodes = "" if stand_in == "none" else GPUS
    variables = {"HOME": str(node.folder), "USER": "me"}
    done = node.command(sys.executable, "-m", "runner", "doctor", "--site", "twcc", "--json", nodes=nodes, **variables)
    found = next(check for check in json.loads(done.stdout) if check["name"] == "sandbox")
    assert found["verdict"] == verdict
    assert words in found["text"]
