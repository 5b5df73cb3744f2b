"""Each choice has a reason, and a slower one than need be names the option that is faster."""

import pytest

from tests.jobs import conftest  # noqa: F401
from training.choices import caches, choices
from training.choices.machine import Machine

H200 = Machine(
    gpu="NVIDIA H200",
    capability=(9, 0),
    bf16=True,
    cores_per_process=8,
    memory_bytes=140 * 2**30,
    packages=frozenset(("flash_attn", "liger_kernel", "triton")),
)
CPU = Machine(memory_bytes=8 * 2**30)
SFT = {"bf16": True, "packing": True, "packing_strategy": "bfd", "attn_implementation": None}


def with_(machine: Machine, **changes: object) -> Machine:
    from dataclasses import replace

    return replace(machine, **changes)


@pytest.mark.parametrize(
    ("machine", "settings", "value", "faster"),
    [
        (H200, SFT, "flash_attention_2", ""),
        (with_(H200, packages=frozenset()), SFT, "sdpa", "an image with flash_attn"),
        (H200, {**SFT, "bf16": False}, "sdpa", "--bf16"),
        (H200, {**SFT, "packing_strategy": "wrapped"}, "sdpa", ""),
        (CPU, SFT, "sdpa", ""),
    ],
    ids=["flash", "not installed", "fp32", "full rows", "cpu"],
)
def test_flash_attention_is_taken_where_rows_hold_documents(
    machine: Machine, settings: dict[str, object], value: str, faster: str
) -> None:
    found = choices.attention(machine, settings, given=False)
    assert found.value == value
    assert found.faster.startswith(faster) and bool(found.faster) == bool(faster)
    assert found.why


def test_the_users_own_attention_stays() -> None:
    found = choices.attention(H200, {**SFT, "attn_implementation": "eager"}, given=True)
    assert (found.value, found.why, found.faster) == ("eager", "as asked", "--attn_implementation sdpa")


def test_float32_on_a_gpu_with_bf16_is_warned_of() -> None:
    assert choices.precision(H200, {}).faster == "--bf16"
    assert choices.precision(H200, {"bf16": True}).faster == ""
    assert choices.precision(CPU, {}).faster == ""
    assert choices.precision(with_(H200, bf16=False), {}).faster == "--fp16"


def test_an_optimizer_of_several_passes_is_warned_of() -> None:
    assert choices.optimizer({"optim": "adamw_torch"}, None).faster == "--optim adamw_torch_fused"
    assert choices.optimizer({"optim": "adamw_torch_fused"}, None).faster == ""
    named = choices.optimizer({"optim": "adamw_torch"}, {"optimizer": {"type": "AdamW"}})
    assert (named.value, named.faster) == ("DeepSpeed's AdamW", "")


def test_activations_computed_twice_are_warned_of_only_where_there_is_room() -> None:
    settings = {"gradient_checkpointing": True}
    assert choices.checkpointing(H200, settings, 2**30).faster == "--gradient_checkpointing false"
    assert choices.checkpointing(H200, settings, 100 * 2**30).faster == ""
    assert choices.checkpointing(H200, settings, None).faster == ""
    assert choices.checkpointing(H200, {"gradient_checkpointing": False}, 2**30).value == "kept"


@pytest.mark.parametrize(
    ("machine", "value", "faster"),
    [
        (with_(H200, processes=1), "none", ""),
        (with_(CPU, processes=2), "gloo", ""),
        (with_(H200, processes=4), "NCCL, peer to peer", ""),
        (with_(H200, processes=4, environment={"NCCL_P2P_DISABLE": "1"}), "NCCL, shared memory", "unset NCCL_P2P"),
        (with_(H200, processes=8, nodes=2), "NCCL over TCP", ""),
        (with_(H200, processes=8, nodes=2, fabric="/dev/cxi0"), "NCCL over TCP", "the annotation com.hooks.aws_ofi"),
        (with_(H200, processes=8, nodes=2, fabric="/dev/cxi0", network_plugin="/l/libnccl-net.so"),
         "NCCL by /l/libnccl-net.so", ""),
        (with_(H200, processes=8, nodes=2, fabric="/dev/infiniband"), "NCCL over InfiniBand", ""),
        (with_(H200, processes=8, nodes=2, fabric="/dev/infiniband", environment={"NCCL_IB_DISABLE": "1"}),
         "NCCL over TCP", "unset NCCL_IB_DISABLE"),
    ],
)  # fmt: skip
def test_tcp_beside_a_faster_network_is_warned_of(machine: Machine, value: str, faster: str) -> None:
    found = choices.transport(machine)
    assert found.value == value
    assert found.faster.startswith(faster) and bool(found.faster) == bool(faster)


MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,relatime - nfs4 server:/home rw
31 30 0:41 / /home/me/fast\\040disk rw,relatime - xfs /dev/nvme0n1 rw
32 22 0:42 / /scratch rw,relatime - lustre fs:/scratch rw
33 22 0:43 / /tmp rw - tmpfs tmpfs rw
""".splitlines()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/x", "ext4"),
        ("/home/me/.cache", "nfs4"),
        ("/home/me/fast disk/x", "xfs"),
        ("/scratch", "lustre"),
        ("/scratchy", "ext4"),
        ("/tmp/not/there/yet", "tmpfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_innermost_mount(path: str, kind: str) -> None:
    from pathlib import Path

    assert caches.kind_at(Path(path), MOUNTS) == kind


def test_compiled_code_goes_to_a_disk_of_the_node_and_the_users_own_place_stays(tmp_path, monkeypatch) -> None:
    environment = {"TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": "/elsewhere"}
    assert caches.point(environment) == ()
    assert environment["TRITON_CACHE_DIR"] == "/elsewhere"
    for variable in ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert environment[variable].startswith(str(tmp_path)), variable
        assert caches.build_key() in environment[variable]
    assert (next(tmp_path.iterdir()).stat().st_mode & 0o777) == 0o700
    # the same place when it starts again: what was compiled is found
    again = {"TMPDIR": str(tmp_path)}
    caches.point(again)
    assert again["TORCH_EXTENSIONS_DIR"] == environment["TORCH_EXTENSIONS_DIR"]


def test_a_shared_file_system_is_passed_over_and_warned_of(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(caches, "file_system", lambda path: "lustre" if str(path).startswith(str(tmp_path)) else "ext4")
    environment = {"TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    (warning,) = caches.point(environment)
    assert "TRITON_CACHE_DIR" in warning and "lustre" in warning
    assert not environment["TORCH_EXTENSIONS_DIR"].startswith(str(tmp_path))


def test_a_folder_that_somebody_else_has_put_there_is_not_used(tmp_path) -> None:
    """Code is loaded from it."""
    import os

    (tmp_path / "theirs").mkdir()
    (tmp_path / f"runner-{os.getuid()}").symlink_to(tmp_path / "theirs")
    found = caches.local_folder({"TMPDIR": str(tmp_path)})
    assert found is None or not str(found).startswith(str(tmp_path))


def test_prebuilt_operators_are_those_that_deepspeed_has_noted_and_it_is_not_imported() -> None:
    """To import all of it takes longer than the rest of what is asked here together."""
    import runpy
    import sys
    from importlib.util import find_spec
    from pathlib import Path

    from training.choices import machine

    spec = find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("no deepspeed")
    note = Path(spec.origin).with_name("git_version_info_installed.py")
    noted = runpy.run_path(str(note))["installed_ops"] if note.is_file() else {}
    before = "deepspeed" in sys.modules
    assert set(machine.prebuilt_operators()) == {name for name, there in noted.items() if there}
    assert ("deepspeed" in sys.modules) == before
