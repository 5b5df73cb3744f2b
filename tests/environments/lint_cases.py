"""For each code of the linter: a file that breaks its rule alone, and the same file fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NGC = "nvcr.io#nvidia/pytorch"
ALPS = "jfrog.example.org#alps-images/ngc-pytorch:26.02-py3-alps6"
STORED = 'image = "quay.io/x/y:1"\nentrypoint = false\n'
OFI = "[annotations]\ncom.hooks.aws_ofi_nccl.enabled = "


@dataclass(frozen=True)
class Case:
    """`image` in front of both texts, unless they name one: a squashfs file that is there."""

    code: str
    broken: str
    fixed: str
    engine: str = "ce"
    severity: str = "error"
    line: int | None = 2
    site: Mapping[str, Any] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    """set for the broken and the fixed file"""
    fixed_environ: Mapping[str, str] = field(default_factory=dict)
    """set for the fixed file alone"""

    @property
    def name(self) -> str:
        return f"{self.code}-{self.severity}-{self.engine}"


def warning(*words: str, **more: Any) -> Case:
    return Case(*words, **{"severity": "warning", **more})


def note(*words: str, **more: Any) -> Case:
    return Case(*words, **{"severity": "note", **more})


def alps(entrypoint: str = "true", cxi: str = "false", ofi: str = "", env: str = 'PMIX_MCA_psec = "native"') -> str:
    hook = f'com.hooks.aws_ofi_nccl.enabled = "{ofi}"\n' if ofi else ""
    return (
        f'image = "{ALPS}"\nentrypoint = {entrypoint}\n[annotations]\ncom.hooks.cxi.enabled = "{cxi}"\n{hook}'
        f"[env]\n{env}\n"
    )


FILE = [
    Case("toml-syntax", "workdir = /w\n", 'workdir = "/w"\n'),
    Case("toml-syntax", 'workdir = "/w\n', 'workdir = "/w"\n'),
    Case("toml-syntax", 'mounts = ["/tmp:/a"\n', 'mounts = ["/tmp:/a"]\n'),
    Case("toml-syntax", 'mounts = [\n"/tmp:/a"\n"/tmp:/b",\n]\n', 'mounts = [\n"/tmp:/a",\n"/tmp:/b",\n]\n', line=4),
    Case("table-twice", '[env]\nA = "1"\n[env]\nB = "1"\n', '[env]\nA = "1"\nB = "1"\n', line=4),
    Case(
        "table-twice",
        '[annotations]\ncom.hooks.cxi.enabled = "true"\n[annotations.com.hooks.cxi]\nenabled = "true"\n',
        '[annotations]\ncom.hooks.cxi.enabled = "true"\n',
        line=4,
    ),
    Case("key-twice", 'workdir = "/a"\nworkdir = "/b"\n', 'workdir = "/b"\n', line=3),
    Case(
        "key-twice",
        '[annotations]\ncom.hooks.cxi.enabled = "true"\n"com.hooks.cxi.enabled" = "true"\n',
        '[annotations]\n"com.hooks.cxi.enabled" = "true"\n',
        line=4,
    ),
    Case("key-after-table", '[env]\nA = "1"\nworkdir = "/w"\n', 'workdir = "/w"\n[env]\nA = "1"\n', line=4),
    Case("key-after-table", '[env]\nA = "1"\nmounts = ["/tmp:/a"]\n', 'mounts = ["/tmp:/a"]\n[env]\nA = "1"\n', line=4),
    Case("key-after-table", "[annotations]\nwritable = false\n", "writable = false\n", line=3),
    warning("key-after-table", 'workdir = "/w"\n[env]\nworkdir = "/w"\n', 'workdir = "/w"\n', line=4),
    Case("unknown-key", 'mount = ["/tmp:/a"]\n', 'mounts = ["/tmp:/a"]\n'),
    Case("unknown-key", "Writable = true\n", "writable = true\n"),
    Case("wrong-type", 'writable = "true"\n', "writable = true\n"),
    Case("wrong-type", 'mounts = "/tmp:/a"\n', 'mounts = ["/tmp:/a"]\n'),
    Case("wrong-type", "mounts = [1]\n", "mounts = []\n"),
    Case("wrong-type", "base_environment = 3\n", 'base_environment = ""\n'),
    Case("wrong-type", 'env = "A=1"\n', 'env = { A = "1" }\n'),
    Case("env-not-text", "[env]\nA = 1\n", '[env]\nA = "1"\n', line=3),
    Case("env-not-text", "[env]\nA = true\n", '[env]\nA = "true"\n', line=3),
    Case("env-name", '[env]\n"1A" = "x"\n', '[env]\nA1 = "x"\n', line=3),
    Case(
        "annotation-not-text",
        "[annotations]\ncom.hooks.cxi.enabled = true\n",
        '[annotations]\ncom.hooks.cxi.enabled = "true"\n',
        line=3,
    ),
    Case("nul-byte", 'workdir = "/w\\u0000"\n', 'workdir = "/w"\n'),
    Case("base-missing", 'base_environment = "nowhere"\n', 'base_environment = "plain"\n'),
    Case("base-circle", 'base_environment = "./it.toml"\n', 'base_environment = "./plain.toml"\n'),
    Case("base-too-deep", 'base_environment = "./level11.toml"\n', 'base_environment = "./level10.toml"\n', line=1),
]

VARIABLES = [
    Case("broken-reference", 'workdir = "/w/${A"\n', 'workdir = "/w/${HOME}"\n'),
    Case("broken-reference", 'workdir = "/w/${A:?}"\n', 'workdir = "/w/${A:-x}"\n'),
    Case("undefined-variable", 'mounts = ["${NOPE}:/x"]\n', 'mounts = ["${HERE}/there:/x"]\n'),
    Case("undefined-variable", 'image = "${NOPE}/a.sqsh"\n', 'image = "${HERE}/a.sqsh"\n', line=1),
    warning("undefined-variable", '[env]\nA = "${NOPE}"\n', '[env]\nA = "${NOPE:-x}"\n', line=3),
    note(
        "undefined-variable",
        'mounts = ["${NOPE}:/x"]\n',
        'mounts = ["${SCRATCH}:/x"]\n',
        setting={"here": False},
    ),
    Case("variable-without-braces", 'workdir = "/w/$HERE"\n', 'workdir = "/w/${HERE}"\n'),
    warning("variable-without-braces", '[env]\nA = "$HERE"\n', '[env]\nA = "${HERE}"\n', line=3),
    Case("variable-in-image", 'image = "quay.io/x/y:${HERE}"\nentrypoint = false\n', STORED, engine="sarus", line=1),
    warning("env-refers-to-env", '[env]\nA = "x"\nB = "${A:-}"\n', '[env]\nA = "x"\nB = "x"\n', line=4),
    Case("placeholder", 'workdir = "/users/{{username}}"\n', 'workdir = "/users/${HERE}"\n'),
    Case("placeholder", 'workdir = "/i/{arch}/x"\n', 'workdir = "/i/arm64/x"\n'),
    Case("placeholder", 'workdir = "/users/<username>"\n', 'workdir = "/users/${HERE}"\n'),
    Case("placeholder", 'image = "quay.io#<org>/<team>:1"\n', 'image = "quay.io#org/team:1"\n', line=1),
    Case(
        "placeholder",
        '[env]\nHF_HOME = "/x/<user>/hf"\n',
        '[env]\nHF_HOME = "/x/${HERE}/hf"\nA = "a<b>c"\nB = "<|eos|> <x>"\n',
        line=3,
    ),
]

IMAGE = [
    Case("image-empty", 'image = ""\n', "", engine="pyxis", line=1),
    Case("image-missing", 'image = "/nowhere/b.sqsh"\n', "", line=1),
    Case("image-not-squashfs", 'image = "${HERE}/text.sqsh"\n', "", line=1),
    Case("image-not-squashfs", 'image = "${HERE}/there"\n', "", line=1),
    Case("image-not-squashfs", 'image = "${HERE}/short.sqsh"\n', "", line=1),
    Case(
        "image-architecture",
        'image = "${HERE}/for-arm64.sqsh"\n',
        'image = "${HERE}/for-amd64.sqsh"\n',
        line=1,
        site={"architecture": "amd64"},
    ),
    Case(
        "image-architecture",
        'image = "quay.io#x/pytorch:rocm6.4"\n',
        'image = "quay.io#x/pytorch:cu128"\n',
        line=1,
        site={"gpu": "NVIDIA GH200"},
    ),
    Case(
        "image-architecture",
        'image = "/i/nemo+26.02.aarch64.sqsh"\n',
        'image = "/i/nemo+26.02.x86_64.sqsh"\n',
        line=1,
        site={"architecture": "amd64"},
        setting={"here": False},
    ),
    Case(
        "image-name",
        'image = "NVIDIA/cuda:12.4.1"\n',
        'image = "nvidia/cuda:12.4.1"\n',
        line=1,
        setting={"here": False},
    ),
    Case("image-scheme", 'image = "docker://x/y:1"\n', 'image = "x/y:1"\n', line=1),
    note("image-no-tag", 'image = "x/y"\n', 'image = "x/y:1"\n', line=1),
    note("image-no-tag", 'image = "x/y:latest"\n', 'image = "x/y:1"\n', line=1),
    Case(
        "image-digest",
        f'image = "x/y:1@sha256:{"a" * 64}"\n',
        'image = "x/y:1"\n',
        engine="pyxis",
        line=1,
        setting={"enroot": (3, 5, 0)},
    ),
    Case("relative-squashfs", 'image = "a.sqsh"\n', 'image = "${HERE}/a.sqsh"\n', line=1),
    Case(
        "slash-after-registry",
        f'image = "{NGC.replace("#", "/")}:25.01-py3"\n',
        f'image = "{NGC}:25.01-py3"\n',
        engine="pyxis",
        line=1,
        setting={"enroot": (3, 5, 0)},
    ),
    warning(
        "slash-after-registry",
        f'image = "{NGC.replace("#", "/")}:25.01-py3"\n',
        f'image = "{NGC}:25.01-py3"\n',
        engine="pyxis",
        line=1,
    ),
    Case("hash-after-registry", 'image = "quay.io#x/y:1"\nentrypoint = false\n', STORED, engine="sarus", line=1),
    Case("hash-after-registry", 'image = "quay.io#x/y:1"\n', 'image = "quay.io/x/y:1"\n', engine="podman", line=1),
    warning("credentials-missing", 'image = "gitlab.example.org#x/y:1"\n', 'image = "quay.io#x/y:1"\n', line=1),
    warning(
        "credentials-missing",
        'image = "gitlab.example.org/x/y:1"\n',
        'image = "quay.io/x/y:1"\n',
        engine="podman",
        line=1,
    ),
    note("credentials-missing", 'image = "ghcr.io#x/y:1"\n', 'image = "quay.io#x/y:1"\n', line=1),
    warning(
        "credentials-half",
        f'image = "{NGC}:25.01-py3"\n',
        f'image = "{NGC}:25.01-py3"\n',
        engine="pyxis",
        line=1,
        environ={"ENROOT_CONFIG_PATH": "half"},
        fixed_environ={"ENROOT_CONFIG_PATH": "home/.config/enroot"},
    ),
]

SARUS = [
    Case(
        "image-missing",
        'image = "${RUNNER_IMAGES}/none.sqsh"\nentrypoint = false\n',
        'image = "${RUNNER_IMAGES}/stored.sqsh"\nentrypoint = false\n',
        engine="sarus",
        line=1,
    ),
    Case("image-path", 'image = "/elsewhere/a.sqsh"\nentrypoint = false\n', STORED, engine="sarus", line=1),
    note(
        "hook-not-default",
        f'{STORED}{OFI}"true"\n',
        f'{STORED}{OFI}"true"\ncom.hooks.cxi.enabled = "true"\n',
        engine="sarus",
        line=1,
    ),
    note(
        "hook-without-effect",
        f'{STORED}[annotations]\ncom.hooks.netstack.source = "host"\n',
        STORED,
        engine="sarus",
        line=4,
    ),
    Case("hook-missing", f'{STORED}[annotations]\ncom.hooks.ssh.enabled = "true"\n', STORED, engine="sarus", line=4),
    note("entrypoint-default", 'image = "quay.io/x/y:1"\n', STORED, engine="sarus", line=1),
    note("env-on-host", f'{STORED}[env]\nA = "${{HERE}}"\n', f'{STORED}[env]\nA = "x"\n', engine="sarus", line=4),
    note("env-on-host", f'{STORED}[env]\nA = ""\n', STORED, engine="sarus", line=4),
]

MOUNTS = [
    Case("mount-syntax", 'mounts = ["/tmp:"]\n', 'mounts = ["/tmp:/a"]\n'),
    Case("mount-syntax", 'mounts = ["~/x:/a"]\n', 'mounts = ["${HERE}/there:/a"]\n'),
    Case("mount-syntax", 'mounts = ["$HERE:/a"]\n', 'mounts = ["${HERE}:/a"]\n'),
    Case("mount-syntax", 'mounts = ["/tmp:/a:ro:x"]\n', 'mounts = ["/tmp:/a:ro"]\n'),
    note("mount-without-target", 'mounts = ["/srv"]\n', 'mounts = ["/srv:/srv"]\n'),
    warning(
        "unknown-key",
        STORED + 'hostname = "me"\n',
        STORED,
        engine="sarus",
        line=3,
    ),
    warning(
        "annotation-not-text",
        STORED + "[annotations]\ncom.x = true\n",
        STORED + '[annotations]\ncom.x = "true"\n',
        engine="sarus",
        line=4,
    ),
    warning(
        "mount-syntax",
        STORED + 'mounts = ["./ccc:./ddd"]\n',
        STORED + 'mounts = ["/tmp:/ddd"]\n',
        engine="sarus",
        line=3,
    ),
    Case(
        "mount-without-target",
        STORED + 'mounts = ["/srv"]\n',
        STORED + 'mounts = ["/srv:/srv"]\n',
        engine="sarus",
        line=3,
    ),
    Case("mount-flag-separator", 'mounts = ["/tmp:/a:ro,private"]\n', 'mounts = ["/tmp:/a:ro+private"]\n'),
    Case(
        "mount-flag-separator",
        STORED + 'mounts = ["/tmp:/a:ro+private"]\n',
        STORED + 'mounts = ["/tmp:/a:ro,private"]\n',
        engine="sarus",
        line=3,
    ),
    Case("mount-flag-unknown", 'mounts = ["/tmp:/a:readonly"]\n', 'mounts = ["/tmp:/a:ro"]\n'),
    Case("mount-flag-unknown", 'mounts = ["${HERE}/a.sqsh:/a:sqsh"]\n', 'mounts = ["/tmp:/a"]\n', engine="pyxis"),
    Case("mount-separator", 'mounts = ["${HERE}/with,comma:/a"]\n', 'mounts = ["${HERE}/there:/a"]\n', engine="pyxis"),
    Case("mount-separator", 'mounts = ["${HERE}/with blank:/a"]\n', 'mounts = ["${HERE}/there:/a"]\n', engine="pyxis"),
    Case("mount-separator", 'mounts = ["${HERE}/there:/a,b"]\n', 'mounts = ["${HERE}/there:/a"]\n', engine="apptainer"),
    Case(
        "mount-separator",
        'mounts = ["${NOPE:-/tmp:x}:/a"]\n',
        'mounts = ["${HERE:-/tmp}:/a"]\n',
        setting={"here": False},
    ),
    Case(
        "mount-separator",
        STORED + 'mounts = ["${HERE:-/tmp}:/a"]\n',
        STORED + 'mounts = ["${HERE}:/a"]\n',
        engine="sarus",
        line=3,
    ),
    Case("mount-source-missing", 'mounts = ["/nowhere:/a"]\n', 'mounts = ["${HERE}/there:/a"]\n', engine="sandbox"),
    warning(
        "mount-source-missing",
        'mounts = ["/nowhere:/a"]\n',
        'mounts = ["${HERE}/there:/a"]\n',
        site={"scheduler": "slurm"},
    ),
    note("mount-relative", 'mounts = ["./:/a"]\n', 'mounts = ["${HERE}:/a"]\n'),
    note("mount-relative", 'mounts = ["./nowhere:/a"]\n', 'mounts = ["${HERE}/there:/a"]\n', engine="sandbox"),
    Case(
        "mount-target-twice",
        'mounts = ["/tmp:/a", "${HERE}/there:/a/"]\n',
        'mounts = ["/tmp:/a", "${HERE}/there:/b"]\n',
    ),
    Case("mount-hides-image", 'mounts = ["/tmp:/usr/lib"]\n', 'mounts = ["/tmp:/usr/lib/x"]\n'),
    warning(
        "mount-all-homes",
        'mounts = ["/home:/a"]\n[env]\nPYTHONNOUSERSITE = "1"\n',
        'mounts = ["/home/me:/a"]\n[env]\nPYTHONNOUSERSITE = "1"\n',
        setting={"here": False},
    ),
    warning(
        "home-shadows-image",
        'mounts = ["${HOME}:${HOME}"]\n',
        'mounts = ["${HOME}:${HOME}"]\n[env]\nPYTHONNOUSERSITE = "1"\n',
    ),
    warning("home-shadows-image", 'mounts = ["${HOME}/:/a"]\n', 'mounts = ["${HERE}/there:/a"]\n'),
    warning("home-shadows-image", 'mounts = ["${HERE}:${HERE}"]\n', 'mounts = ["${HERE}/there:${HERE}/there"]\n'),
    warning(
        "read-only-folder", 'workdir = "/a/b"\nmounts = ["/tmp:/a:ro"]\n', 'workdir = "/a/b"\nmounts = ["/tmp:/a"]\n'
    ),
    warning("read-only-folder", 'workdir = "/b"\nwritable = false\n', 'workdir = "/b"\nwritable = true\n'),
    warning(
        "read-only-folder",
        'mounts = ["/tmp:/a:ro"]\n[env]\nHF_HOME = "/a/hf"\n',
        'mounts = ["/tmp:/a"]\n[env]\nHF_HOME = "/a/hf"\n',
        line=4,
    ),
    warning(
        "read-only-folder",
        'mounts = ["/tmp:/a:ro"]\n[env]\nXDG_DATA_HOME = "/a/x"\n',
        'mounts = ["/tmp:/a:ro"]\n[env]\nCUDA_HOME = "/a/cuda"\nJAVA_HOME = "/a/jdk"\n',
        line=4,
    ),
]

ENV = [
    Case("secret-value", '[env]\nHF_TOKEN = "x"\n', '[env]\nHF_TOKEN = "${HF_TOKEN:-}"\n', line=3),
    Case("secret-value", '[env]\nHF_TOKEN = "hf_x1"\n', '[env]\nHF_TOKEN = "<your token>"\n', line=3),
    Case("secret-value", '[env]\nA = "hf_abcdefghijklmnopqrst"\n', '[env]\nA = "hf_hub"\n', line=3),
    Case("secret-value", '[env]\nP = "http://me:hunter2@proxy:3128"\n', '[env]\nP = "http://proxy:3128"\n', line=3),
    Case("secret-value", '[env]\nWANDB_API_KEY = "0a1b"\n', '[env]\nTOKENIZERS_PARALLELISM = "false"\n', line=3),
    warning("path-replaced", '[env]\nPATH = "/mine"\n', '[env]\nPATH = "/mine:${PATH}"\n', line=3),
    warning(
        "path-replaced",
        'image = "${HERE}/pytorch-25.01.sqsh"\n[env]\nLD_LIBRARY_PATH = "/mine"\n',
        'image = "${HERE}/pytorch-25.01.sqsh"\n[env]\nLD_LIBRARY_PATH = "/mine:${LD_LIBRARY_PATH:-}"\n',
        line=3,
    ),
    warning(
        "gpus-hidden",
        '[env]\nNVIDIA_VISIBLE_DEVICES = "void"\n',
        '[env]\nNVIDIA_VISIBLE_DEVICES = "all"\n',
        line=3,
        site={"gpus_per_node": 4},
    ),
    warning(
        "gpus-hidden",
        '[env]\nROCR_VISIBLE_DEVICES = "0,1,2"\n',
        '[env]\nROCR_VISIBLE_DEVICES = "0,1,2,3"\n',
        line=3,
        site={"gpus_per_node": 4},
    ),
    warning("gpus-hidden", '[env]\nCUDA_VISIBLE_DEVICES = "0"\n', '[env]\nCUDA_VISIBLE_DEVICES = ""\n', line=3),
    warning(
        "stale-tuning",
        f'[env]\nNCCL_NET_PLUGIN = "mine"\n{OFI}"true"\n',
        '[env]\nNCCL_NET_PLUGIN = "mine"\nNCCL_PROTO = "^LL128"\n',
        line=3,
    ),
    warning("stale-tuning", '[env]\nNCCL_PROTO = "^LL128"\n', '[env]\nNCCL_DEBUG = "INFO"\n', line=3),
    warning("nccl-over-tcp", '[env]\nNCCL_NET = "Socket"\n', "", line=3),
    warning(
        "nccl-over-tcp",
        'image = "quay.io#x/vllm-openai:v0.9"\n',
        'image = "quay.io#x/vllm-openai:v0.9"\n[env]\nNCCL_NET_PLUGIN = "mine"\n',
        line=1,
        site={"gpus_per_node": 4},
    ),
    warning(
        "nccl-over-tcp",
        'image = "quay.io#x/vllm-openai:v0.9"\n',
        'image = "quay.io#x/cuda-sample:vectoradd"\n[env]\nFI_LOG_LEVEL = "warn"\n',
        line=1,
        site={"gpus_per_node": 4},
    ),
    warning(
        "nccl-over-tcp",
        'image = "${HERE}/pytorch-25.01.sqsh"\n',
        f'image = "${{HERE}}/pytorch-25.01.sqsh"\n{OFI}"true"\n',
        line=1,
        site={"gpus_per_node": 4},
    ),
]


def variant(name: str) -> str:
    return f'{OFI}"true"\ncom.hooks.aws_ofi_nccl.variant = "{name}"\n'


HOOKS = [
    warning(
        "annotation-unknown",
        '[annotations]\ncom.hooks.aws_ofi_ncll.enabled = "true"\n',
        '[annotations]\ncom.hooks.aws_ofi_nccl.enabled = "true"\n',
        line=3,
    ),
    Case("annotation-value", f'{OFI}"True"\n', f'{OFI}"true"\n', line=3),
    Case("annotation-value", variant("cuda11"), variant("cuda12"), line=4),
    Case(
        "hook-variant",
        f'image = "{NGC}:25.08-py3"\n{variant("cuda12")}',
        f'image = "{NGC}:25.08-py3"\n{variant("cuda13")}',
        line=4,
    ),
    Case(
        "hook-variant",
        f'image = "{NGC}:24.06-py3"\n{variant("cuda-dl")}',
        f'image = "{NGC}:24.06-py3"\n{variant("cuda12")}',
        line=4,
    ),
    Case(
        "hook-variant",
        f'image = "${{HERE}}/for-amd64.sqsh"\n{variant("cuda13")}',
        f'image = "${{HERE}}/for-amd64.sqsh"\n{variant("cuda12")}',
        line=4,
    ),
    Case(
        "hook-variant",
        f'image = "rocm/pytorch:rocm6.2"\n{variant("cuda12")}',
        f'image = "rocm/pytorch:rocm6.2"\n{variant("rocm6")}',
        line=4,
    ),
    Case(
        "hook-variant",
        f'image = "rocm/pytorch:rocm5.7"\n{variant("rocm6")}',
        f'image = "rocm/pytorch:rocm5.7"\n{variant("rocm5")}',
        line=4,
    ),
    warning(
        "hook-variant",
        f'image = "rocm/pytorch:rocm7.0"\n{variant("rocm6")}',
        f'image = "rocm/pytorch:latest-rocm"\n{variant("rocm6")}',
        line=4,
    ),
    note(
        "hook-variant-ignored",
        f'image = "/x/sglang_cuda13.sqsh"\n{variant("cuda12")}',
        f'image = "/x/sglang_cuda13.sqsh"\n{variant("cuda13")}',
        line=4,
        site={"netstack_source": "artifact"},
        setting={"here": False},
    ),
    Case(
        "hook-variant",
        f'image = "/x/sglang_cuda13.sqsh"\n{variant("cuda12")}',
        f'image = "/x/sglang_cuda13.sqsh"\n{variant("cuda13")}',
        line=4,
        site={"netstack_source": "host"},
        setting={"here": False},
    ),
    warning(
        "musl-image",
        'image = "quay.io#x/alpine:3.19"\n',
        'image = "quay.io#x/alpine:3.19"\nannotations."com.hooks.cxi.enabled" = "false"\nenv.ENROOT_SLURM_HOOK = "0"\n',
        line=1,
    ),
    warning(
        "musl-image",
        'image = "quay.io#x/python:3.12-alpine3.19"\n[annotations]\ncom.hooks.cxi.enabled = "false"\n',
        'image = "quay.io#x/alpines:3.12"\n',
        line=1,
    ),
    note(
        "cudart-link-missing",
        f'image = "quay.io#nvidia/cuda:12.4.1-runtime"\n{OFI}"true"\n',
        f'image = "quay.io#nvidia/cuda:12.4.1-devel"\n{OFI}"true"\n',
        line=3,
        site={"netstack_source": "artifact"},
    ),
    note(
        "nccl-over-ssh",
        f'writable = true\n{OFI}"true"\ncom.hooks.ssh.enabled = "true"\n',
        f'writable = true\n{OFI}"true"\ncom.hooks.ssh.enabled = "false"\n',
        line=5,
    ),
    warning(
        "ssh-key-hidden",
        'writable = true\nmounts = ["/tmp:/users/me"]\n[annotations]\ncom.hooks.ssh.enabled = "true"\n',
        'writable = true\nmounts = ["/tmp:/users/me/data"]\n[annotations]\ncom.hooks.ssh.enabled = "true"\n',
        line=5,
    ),
    note(
        "base-missing",
        'base_environment = "nowhere"\n',
        'base_environment = "plain"\n',
        setting={"here": False},
    ),
    note(
        "hook-variant-ignored",
        f'{variant("cuda12")}com.hooks.netstack.source = "artifact"\n',
        f'{variant("cuda12")}com.hooks.netstack.source = "host"\n',
        line=4,
    ),
    warning(
        "hook-conflict",
        f'{OFI}"true"\ncom.hooks.cxi.enabled = "false"\n',
        f'{OFI}"true"\ncom.hooks.cxi.enabled = "true"\n',
        line=4,
    ),
    Case(
        "hook-needs-writable",
        'writable = false\n[annotations]\ncom.hooks.nvidia_cuda_mps.enabled = "true"\n',
        'writable = true\n[annotations]\ncom.hooks.nvidia_cuda_mps.enabled = "true"\n',
    ),
    Case(
        "ssh-key",
        '[annotations.com.hooks.ssh]\nauthorize_ssh_key = "ssh-ed25519 AAAA me@here"\n',
        '[annotations.com.hooks.ssh]\nauthorize_ssh_key = "${HOME}/.ssh/id_ed25519.pub"\n',
        line=3,
    ),
    Case(
        "ssh-key",
        '[annotations.com.hooks.ssh]\nauthorize_ssh_key = "~/.ssh/id_ed25519.pub"\n',
        '[annotations.com.hooks.ssh]\nauthorize_ssh_key = "/users/me/.ssh/id_ed25519.pub"\n',
        line=3,
    ),
    warning(
        "rank-remap",
        '[annotations]\ncom.pyxis.pytorch_remap_vars = "true"\n',
        '[annotations]\ncom.pyxis.pytorch_remap_vars = "false"\n',
        line=3,
    ),
    Case("extended-image-hook", alps(ofi="true"), alps(ofi="false"), line=5),
    Case("extended-image-entrypoint", alps(entrypoint="false"), alps()),
    Case("extended-image-cxi", alps(cxi="true"), alps(), line=4),
    warning("extended-image-pmix", alps(env='A = "1"'), alps(), line=1),
    Case("engine-refuses", 'devices = ["nvidia.com/gpu=all"]\n', ""),
    Case("engine-refuses", '[annotations]\na.b = "c"\n', "", engine="sandbox", line=3),
]

CASES = [*FILE, *VARIABLES, *IMAGE, *SARUS, *MOUNTS, *ENV, *HOOKS]
