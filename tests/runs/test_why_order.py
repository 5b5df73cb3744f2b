"""Of several messages, the one that came first and caused the others is the cause, and its own words are shown.

The logs are shortened from public threads; hosts, paths and ids are replaced.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.runs.why.explain import Answer, explain_logs

TIMEOUT = (
    "[rank1]:[E806 16:18:52.413000000 ProcessGroupNCCL.cpp:689] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=3678376, OpType=SEND, NumelIn=3584, NumelOut=3584, Timeout(ms)=600000) ran for 600003 "
    "milliseconds before timing out.\n"
)
CGROUP = (
    "slurmstepd: error: xcgroup_instantiate: unable to create cgroup '/sys/fs/cgroup/memory/slurm/uid_1000' : "
    "No space left on device\n"
)
TRACEBACK = """\
Traceback (most recent call last):
  File "/work/train.py", line 12, in <module>
    {code}
{error}
"""
PEER = "[{who}]: RuntimeError: [/opt/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.12]:40321\n"
XET = (
    '{"timestamp":"2025-08-08T12:05:28.040611Z","level":"WARN","fields":{"message":"Reqwest(reqwest::Error { kind: '
    'Request, source: Error(Connect, ConnectFailed(ConnectError(\\"dns error\\", Custom { error: \\"failed to lookup '
    'address information: Name or service not known\\" }))) }). Retrying..."},"filename":"xet-core/http_client.rs"}\n'
)
TORCHRUN = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
Root Cause (first observed failure):
[0]:
  time      : 2026-03-01_10:00:00
  host      : nid001
  rank      : {rank} (local_rank: {rank})
  exitcode  : 1 (pid: 4711)
"""


def answer(folder: Path, *logs: str) -> Answer:
    paths = [folder / f"{number}.log" for number, _ in enumerate(logs)]
    for path, text in zip(paths, logs, strict=True):
        path.write_text(text)
    return explain_logs(paths)


def code(folder: Path, *logs: str) -> str:
    cause = answer(folder, *logs).cause
    return cause.code if cause else "-"


def labelled(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def error(text: str, source: str = "model(**batch)") -> str:
    return TRACEBACK.format(code=source, error=text)


LATE = error("OSError: [Errno 39] Directory not empty: 'tmp_x'", "clean()")


def test_what_comes_after_a_timeout_is_not_its_cause(tmp_path: Path) -> None:
    rest = "Fatal Python error: Aborted\n" + PEER.format(who="rank0") + LATE
    assert code(tmp_path, TIMEOUT + rest) == "nccl-timeout"


def test_what_a_process_says_while_it_ends_after_a_timeout_is_not_its_cause(tmp_path: Path) -> None:
    waited = "[rank6]: RuntimeError: DeepEP error: timeout (dispatch CPU)\n"
    ends = "terminate called after throwing an instance of 'c10::AcceleratorError'\n{}  what():  CUDA error: {}\n"
    access, ecc = "an illegal memory access was encountered", "uncorrectable ECC error encountered"
    assert code(tmp_path, waited + ends.format("", access)) == "nccl-timeout"
    assert code(tmp_path, ends.format("", access) + waited) == "gpu-illegal-access"
    assert code(tmp_path, waited + ends.format("[rank3]:", access)) == "gpu-illegal-access"
    assert code(tmp_path, waited + ends.format("", ecc)) == "gpu-ecc"


def test_a_message_that_the_training_outran_before_is_not_the_cause_when_it_comes_again(tmp_path: Path) -> None:
    lacks = "Could not load library libnvrtc.so.11.2. Error: libnvrtc.so.11.2: cannot open shared object file\n"
    step = "Epoch 0: 0%| | 2/2500 [00:04<1:36:38, 0.43it/s, loss=1.540]"
    nan = "RuntimeError: Function 'LogSoftmaxBackward0' returned nan values in its 0th output."
    assert code(tmp_path, lacks + step + lacks + error(nan)) == "nan-gradient"
    assert code(tmp_path, lacks + step + lacks) == "library-missing"
    assert code(tmp_path, step + lacks + error(nan)) == "library-missing"
    full = error("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.")
    assert code(tmp_path, "skipping a step: CUDA error: out of memory\n" + step + "\n" + full) == "gpu-out-of-memory"


def test_in_another_log_the_times_tell_what_came_after_a_timeout(tmp_path: Path) -> None:
    late = "2026-08-06 16:18:55 cleaning up\n" + LATE
    early = "2026-08-06 16:08:40 saving\n" + LATE
    assert code(tmp_path, "2026-08-06 16:08:00 start\n" + TIMEOUT, late) == "nccl-timeout"
    assert code(tmp_path, "2026-08-06 16:08:00 start\n" + TIMEOUT, early) == "file-exists"


def test_a_fault_that_is_reported_after_a_timeout_may_be_older(tmp_path: Path) -> None:
    killed = (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.\n"
    )
    assert code(tmp_path, TIMEOUT + killed) == "host-out-of-memory"


def test_a_rank_that_lost_another_one_fails_on_its_way_out(tmp_path: Path) -> None:
    late = labelled(0, LATE)
    assert code(tmp_path, PEER.format(who="rank0") + late) == "peer-closed"
    assert code(tmp_path, PEER.format(who="rank0").removeprefix("[rank0]: ") + LATE) == "peer-closed"
    other = labelled(1, error("KeyError: 'getpwuid(): uid not found: 1042'"))
    assert code(tmp_path, PEER.format(who="rank0") + late + other) == "user-unknown"
    killed = "  traceback : Signal 9 (SIGKILL) received by PID 15241\n"
    assert code(tmp_path, PEER.format(who="rank0") + killed) == "killed-rank"


def test_noise_at_the_start_is_not_the_cause_of_a_later_traceback(tmp_path: Path) -> None:
    training = "{'loss': 2.1, 'step': 10}\n"
    shapes = (
        "RuntimeError: The size of tensor a (512) must match the size of tensor b (513) at non-singleton dimension 1"
    )
    assert code(tmp_path, CGROUP + training + error(shapes)) == "shape-mismatch"
    assert code(tmp_path, CGROUP + error(shapes)) == "shape-mismatch"
    assert code(tmp_path, CGROUP) == "launch-failed"


def test_a_node_that_does_not_start_is_why_the_others_wait(tmp_path: Path) -> None:
    start = "srun: error: Task launch for StepId=1.0 failed on node nid002: Plugin initialization failed\n"
    waiting = "The client socket has timed out after 600000ms while trying to connect to (nid001, 29500)."
    assert code(tmp_path, start + error(f"torch.distributed.DistNetworkError: {waiting}")) == "launch-failed"


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ("KeyError: 'getpwuid(): uid not found: 1042'", "user-unknown"),
        ("OSError: [Errno 28] No space left on device: '/tmp/torchinductor_u/x'", "disk-full"),
        ("SystemError: PY_SSIZE_T_CLEAN macro must be defined for '#' formats", "compile-failed"),
    ],
)
def test_what_a_wrapper_wraps_is_the_cause(tmp_path: Path, inner: str, expected: str) -> None:
    assert code(tmp_path, f"torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\n{inner}\n") == expected


@pytest.mark.parametrize(
    ("reason", "report", "expected"),
    [
        ("", "FATAL ERROR:Failed to write to output filesystem", "image-write"),
        (
            "Write failed because No space left on device",
            "FATAL ERROR:Failed to write to output filesystem",
            "disk-full",
        ),
        ("", "ray.exceptions.RuntimeEnvSetupError: Failed to set up runtime environment.", "ray-runtime-env"),
        (
            "ERROR: No matching distribution found for flash-attn==9.9",
            "ray.exceptions.RuntimeEnvSetupError: Failed to set up runtime environment.",
            "pip-version",
        ),
    ],
)
def test_what_only_reports_a_failed_step_yields_to_its_reason(
    tmp_path: Path, reason: str, report: str, expected: str
) -> None:
    assert code(tmp_path, f"{reason}\n{report}\n") == expected
    assert code(tmp_path, f"{report}\n{reason}\n") == expected


def test_what_one_line_wraps_is_the_cause_too(tmp_path: Path) -> None:
    line = "torch._dynamo.exc.InternalTorchDynamoError: ImportError: libcuda.so.1: cannot open shared object file"
    assert code(tmp_path, f"{line}: No such file or directory\n") == "library-missing"


def test_an_exception_that_says_nothing_is_explained_by_the_one_that_it_was_raised_from(tmp_path: Path) -> None:
    direct = "\nThe above exception was the direct cause of the following exception:\n\n"
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    inner, outer = error("KeyError: 'labels'", "batch['labels']"), error("RuntimeError: training failed")
    found = answer(tmp_path, inner + direct + outer)
    assert found.cause is not None and (found.cause.code, found.line) == ("key-missing", "KeyError: 'labels'")
    assert code(tmp_path, inner + during + outer) == "python-exception"


def test_the_summary_of_a_launcher_never_wins(tmp_path: Path) -> None:
    launcher = "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.\n"
    srun = "srun: error: nid001: task 0: Exited with exit code 1\n"
    inner = error("RuntimeError: CUDA error: an illegal memory access was encountered")
    assert code(tmp_path, srun + launcher + inner + TORCHRUN.format(rank=0)) == "gpu-illegal-access"


def test_without_times_the_rank_that_torchrun_names_counts(tmp_path: Path) -> None:
    ranks = labelled(5, error("KeyError: 'b'")) + labelled(2, error("OSError: [Errno 28] No space left on device"))
    found = answer(tmp_path, ranks + TORCHRUN.format(rank=2))
    assert found.cause is not None and (found.cause.code, found.rank) == ("disk-full", 2)
    found = answer(tmp_path, ranks + TORCHRUN.format(rank=5))
    assert found.cause is not None and (found.cause.code, found.rank) == ("key-missing", 5)


def test_frames_and_names_decide_what_a_last_line_means(tmp_path: Path) -> None:
    zero = """\
[rank2]:   File "/v/lib/python3.11/site-packages/deepspeed/runtime/zero/partitioned_param_coordinator.py", line 194
[rank2]:     step_id = self.__step_id_module_fetched_for[sub_module.id].popleft()
[rank2]: IndexError: pop from an empty deque
"""
    assert code(tmp_path, zero) == "deepspeed-zero3-trace"
    assert code(tmp_path, error("IndexError: pop from an empty deque", "queue.popleft()")) == "index-range"
    capture = """\
[rank3]: torch.AcceleratorError: CUDA error: operation failed due to a previous error during capture
[rank3]: Search for `cudaErrorStreamCaptureInvalidated' in https://docs.nvidia.com/cuda/cuda-runtime-api/ for more.
"""
    assert code(tmp_path, capture) == "gpu-graph-capture"
    full = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.\n"
    assert code(tmp_path, full + capture) == "gpu-out-of-memory"
    assert code(tmp_path, capture + full) == "gpu-out-of-memory"


NCCL = """\
torch.distributed.DistBackendError: NCCL error in: /opt/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled cuda \
error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.3
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
"""


def test_the_last_error_of_nccl_is_used_and_shown(tmp_path: Path) -> None:
    reason = "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation'."
    found = answer(tmp_path, NCCL + reason + "\nDisable NVLS (NCCL_NVLS_ENABLE=0) if you wish to avoid this error.\n")
    assert found.cause is not None and found.cause.code == "gpu-not-ready" and "NCCL_NVLS_ENABLE=0" in found.cause.fix
    assert found.line == reason
    lost = "NET/IB: Got completion from peer 10.0.0.1<4> with status=12 opcode=0 len=0 vendor err 129"
    assert code(tmp_path, NCCL + lost + "\n") == "nccl-ib-completion"
    found = answer(tmp_path, NCCL + "Some words of a newer version\n")
    assert found.cause is not None and found.cause.code == "nccl-internal-error"
    assert found.line == "Some words of a newer version" and found.evidence.endswith(":4")


def test_a_reason_in_a_line_of_json_is_read_and_its_level_counts(tmp_path: Path) -> None:
    failed = "RuntimeError: Data processing error: CAS service error : Request failed after 5 retries\n"
    assert code(tmp_path, XET + XET + failed) == "hub-unreachable"
    assert code(tmp_path, XET + error("KeyError: 'b'")) == "key-missing"
    assert code(tmp_path, XET.replace("dns error", "InvalidCertificate(UnknownIssuer)") + failed) == "tls-certificate"
    assert code(tmp_path, XET.replace("failed to lookup", "kind: NetworkUnreachable") + failed) == "hub-unreachable"
    assert code(tmp_path, failed) == "hub-timeout"


def test_a_hook_is_explained_by_its_name_and_its_reason(tmp_path: Path) -> None:
    hook = """\
slurmstepd: error: pyxis: container start failed with error code: 1
slurmstepd: error: pyxis: printing enroot log file:
{}slurmstepd: error: pyxis:     [ERROR] /etc/enroot/hooks.d/{} exited with return code 1
slurmstepd: error: pyxis: couldn't start container
srun: error: nid001: task 0: Exited with exit code 1
"""
    reason = "slurmstepd: error: pyxis:     [ERROR] Failed to refresh the dynamic linker cache\n"
    assert code(tmp_path, hook.format(reason, "87-slurm.sh")) == "container-no-glibc"
    reasons = ("[ERROR] Could not find any device", "/etc/enroot/hooks.d/99-x.sh: line 7: pwck: command not found")
    for reason in reasons:
        found = answer(tmp_path, hook.format(f"slurmstepd: error: pyxis:     {reason}\n", "99-x.sh"))
        assert found.cause is not None and found.cause.code == "enroot-hook"
        assert found.line.endswith(reason) and "`99-x.sh`" in found.cause.fix


STORIES = {
    "[rank0]: AssertionError: no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 3":
        ("deepspeed-no-sync", r"accumulat"),
    "ImportError: /v/torch/lib/libtorch_cuda.so: undefined symbol: ncclMemFree": ("nccl-library", r"libnccl"),
    "FileNotFoundError: [Errno 2] Failed to open local file '/c/csv/d-38/2d.incomplete/csv-validation.arrow'. "
    "Detail: [errno 2] No such file or directory": ("data-cache", r"at once"),
    "[rank1]: PermissionError: [Errno 13] Permission denied: '/.cache'": ("home-missing", r"HOME"),
    "PermissionError: [Errno 13] Permission denied: '/.triton/cache/0a1b'": ("home-missing", r"HOME"),
    "PermissionError: [Errno 13] Permission denied: '/home/other/.cache'": ("permission", r"another user"),
    "/usr/local/bin/nvidia_entrypoint.sh: line 81: exec: --: invalid option": ("shell-option", r"option"),
}  # fmt: skip


@pytest.mark.parametrize("line", STORIES)
def test_the_story_fits_not_only_the_family(tmp_path: Path, line: str) -> None:
    expected, words = STORIES[line]
    cause = answer(tmp_path, f"{line}\nsrun: error: node01: task 0: Exited with exit code 2\n").cause
    assert cause is not None and cause.code == expected
    assert re.search(words, f"{cause.says} {cause.explanation} {cause.fix}")


def test_the_message_is_shown_not_the_line_of_code_that_raises_it(tmp_path: Path) -> None:
    log = """\
[rank6]:   File "/opt/conda/lib/python3.11/site-packages/transformers/integrations/deepspeed.py", line 504, in load
[rank6]:     raise ValueError(f"Can't find a valid checkpoint at {checkpoint_path}")
[rank6]: ValueError: Can't find a valid checkpoint at /scratch/out/checkpoint-300
"""
    found = answer(tmp_path, log)
    assert found.cause is not None and found.cause.code == "checkpoint-none"
    assert found.line.endswith("/scratch/out/checkpoint-300")
    log = '  File "/v/x.py", line 5, in inject\n    logger.error("CUDA out of memory. Tried to")\nKeyError: \'x\'\n'
    assert code(tmp_path, log) == "key-missing"


def test_of_an_unknown_shell_error_the_line_is_shown(tmp_path: Path) -> None:
    line = "/opt/start.sh: line 7: ulimit: core file size: bad number\n"
    found = answer(tmp_path, f"loading\n{line}srun: error: n1: task 0: Exited with exit code 2\n")
    assert found.cause is None and [each.number for each in found.telling] == [2]


def test_what_follows_a_cancellation_is_not_the_cause(tmp_path: Path) -> None:
    cancelled = "slurmstepd: error: *** JOB 25 ON nid002 CANCELLED AT 2026-11-21T16:40:26 ***\n"
    assert code(tmp_path, cancelled + LATE) == "cancelled"
    assert code(tmp_path, LATE + cancelled) == "file-exists"


def test_a_rank_that_was_told_to_end_fails_on_its_way_out(tmp_path: Path) -> None:
    told = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15"
    assert code(tmp_path, labelled(0, error(told)) + labelled(0, LATE)) == "told-to-end"
    assert code(tmp_path, labelled(0, error(told)) + labelled(1, error("KeyError: 'b'"))) == "key-missing"


def test_a_message_of_a_tool_that_the_training_outran_is_not_the_cause_of_a_later_traceback(tmp_path: Path) -> None:
    noise = "Failed to initialize NVML: Driver/library version mismatch\n"
    training = "{'loss': 2.1, 'step': 10}\n"
    assert code(tmp_path, noise + training + error("KeyError: 'labels'")) == "key-missing"
    assert code(tmp_path, noise + error("KeyError: 'labels'")) == "gpu-unknown-error"
    assert code(tmp_path, noise + training) == "gpu-unknown-error"
    xid = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus\n"
    assert code(tmp_path, xid + training + error("KeyError: 'labels'")) == "gpu-xid"


def test_what_a_shell_lacked_is_the_cause_only_of_what_it_explains(tmp_path: Path) -> None:
    module = "/var/spool/slurmd/job1/slurm_script: line 5: module: command not found\n"
    assert code(tmp_path, module + error("KeyError: 'labels'")) == "key-missing"
    assert code(tmp_path, module + error("ModuleNotFoundError: No module named 'torch'")) == "module-command"
    assert code(tmp_path, module + "srun: error: node01: task 0: Exited with exit code 1\n") == "module-command"


@pytest.mark.parametrize(
    "line",
    [
        "curl: (7) Failed to connect to localhost port 8000 after 0 ms: Connection refused",
        "curl: (7) Failed to connect to 127.0.0.1 port 8000 after 0 ms: Couldn't connect to server",
    ],
)
def test_a_script_that_waits_for_its_own_server_has_not_failed_yet(tmp_path: Path, line: str) -> None:
    full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB."
    assert code(tmp_path, f"{line}\n{line}\n" + error(full)) == "gpu-out-of-memory"
    assert code(tmp_path, f"{line}\nsrun: error: nid001: task 0: Exited with exit code 1\n") == "-"


def test_curl_speaks_of_the_registry_only_where_an_image_is_imported(tmp_path: Path) -> None:
    timeout = "curl: (28) Connection timed out after 300001 milliseconds\n"
    assert code(tmp_path, timeout) == "web-unreachable"
    assert code(tmp_path, "[INFO] Querying registry for permission grant\n" + timeout) == "registry-unreachable"
    assert code(tmp_path, "slurmstepd: error: pyxis:     " + timeout) == "registry-unreachable"
    assert code(tmp_path, "curl: (6) Could not resolve host: auth.docker.io\n") == "registry-unreachable"
    assert code(tmp_path, "curl: (6) Could not resolve host: raw.githubusercontent.com\n") == "web-unreachable"


KEY = "KeyError: 'labels'"
NO_FILE = "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.jsonl'"
TOOLS = {
    "sh: 1: which: not found": "program-missing",
    "/var/spool/slurmd/job1/slurm_script: line 5: ml: command not found": "program-missing",
    "find: '/proc/1/task': Permission denied": "permission",
    "ls: cannot open directory '/root': Permission denied": "permission",
    "wget: unable to resolve host address 'example.org'": "web-unreachable",
    "curl: (6) Could not resolve host: raw.githubusercontent.com": "web-unreachable",
    "slurmstepd: error: couldn't chdir to `/x': No such file or directory: going to /tmp instead": "folder-missing",
}


@pytest.mark.parametrize("line", TOOLS)
def test_what_a_shell_or_tool_says_is_the_cause_only_where_the_script_did_not_go_on(tmp_path: Path, line: str) -> None:
    full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB."
    limit = "slurmstepd: error: *** JOB 25 ON nid002 CANCELLED AT 2026-11-21T16:40:26 DUE TO TIME LIMIT ***\n"
    end = "srun: error: node01: task 0: Exited with exit code 1\n"
    assert code(tmp_path, f"{line}\n{error(full)}{end}") == "gpu-out-of-memory"
    assert code(tmp_path, f"{line}\n{error(KEY)}{end}") == "key-missing"
    assert code(tmp_path, f"{line}\n{limit}") == "time-limit"
    assert code(tmp_path, f"{line}\n{end}") == TOOLS[line]
    assert code(tmp_path, f"{line}\n{error(NO_FILE)}{end}") == TOOLS[line]


@pytest.mark.parametrize(
    ("line", "alone"),
    [
        (
            "slurmstepd: error:  mpi/pmix_v4: pmixp_p2p_send: nid002 [1]: pmixp_utils.c:467: send failed, rc=1001",
            "pmix",
        ),
        ("[nid002:4711] PMIX ERROR: ERROR in file gds_ds12_lock_pthread.c at line 169", "pmix"),
        (
            "[WARN] Squashfs image uses lzo compression, this version supports only xz, zlib, zstd.",
            "squashfs-compression",
        ),
        ("wandb: ERROR Error while calling W&B API: context deadline exceeded (<Response [500]>)", "wandb-unreachable"),
        ("  what():  CUDA error: driver shutting down", "gpu-initialization"),
        ("srun: error: Unable to create step for job 4711: Job/step already completing or completed", "job-gone"),
        ("nid001:1:2 [0] NCCL WARN NET/OFI Failed to initialize tuner, using the default", "nccl-ofi"),
        ("A module that was compiled using NumPy 1.x cannot be run in NumPy 2.3.1 as it may crash.", "numpy-abi"),
        ("AttributeError: _ARRAY_API not found", "numpy-abi"),
        (
            "ERROR: This container was built for NVIDIA Driver Release 580.82 or later, but version 550.54 was "
            "detected and compatibility mode is UNAVAILABLE.",
            "gpu-driver-too-old",
        ),
        ("[nid002:4711] mca_base_component_repository_open: unable to open mca_op_avx: undefined symbol: ompi_op", "-"),
        ("LustreError: 11-0: scratch-OST0001-osc: operation ost_read to node 10.0.0.1@o2ib failed: rc = -110", "-"),
    ],
)
def test_what_others_say_around_a_traceback_is_not_its_cause(tmp_path: Path, line: str, alone: str) -> None:
    assert code(tmp_path, f"{error(KEY)}{line}\n") == "key-missing"
    assert code(tmp_path, f"{line}\n{error(KEY)}") == "key-missing"
    assert code(tmp_path, labelled(3, error(KEY)) + f"{line}\n") == "key-missing"
    assert code(tmp_path, f"{line}\n") == alone


def test_what_nccl_warned_of_is_the_cause_where_nccl_failed(tmp_path: Path) -> None:
    warning = "nid001:1:2 [0] NCCL WARN NET/OFI Couldn't open CQ. RC: -22, ERROR: Invalid argument\n"
    assert code(tmp_path, warning + error("ValueError: bad row 7")) == "python-exception"
    assert code(tmp_path, warning + NCCL + "\n" + error("ValueError: bad row 7")) == "nccl-ofi"


def test_what_cuda_says_on_the_way_out_does_not_explain_an_exception_but_a_fault_of_the_gpu_does(
    tmp_path: Path,
) -> None:
    ends = "terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  CUDA error: {}\n"
    failed = error("ValueError: bad row 7")
    assert code(tmp_path, failed + ends.format("an illegal memory access was encountered")) == "python-exception"
    assert code(tmp_path, labelled(1, failed) + ends.format("uncorrectable ECC error encountered")) == "gpu-ecc"


LOST = """\
Exception in thread QueueFeederThread:
Traceback (most recent call last):
  File "/usr/lib/python3.12/multiprocessing/queues.py", line 244, in _feed
    send_bytes(obj)
  File "/usr/lib/python3.12/multiprocessing/connection.py", line 377, in _send
    n = write(self._handle, buf)
BrokenPipeError: [Errno 32] Broken pipe
"""
LEFT_OVER = """\
Traceback (most recent call last):
  File "/usr/lib/python3.12/multiprocessing/util.py", line 303, in _run_finalizers
    finalizer()
  File "/usr/lib/python3.12/multiprocessing/util.py", line 133, in _remove_temp_dir
    rmtree(tempdir, onerror=onerror)
OSError: [Errno 39] Directory not empty: '/tmp/pymp-x1'
"""


@pytest.mark.parametrize(("lost", "alone"), [(LOST, "connection-lost"), (LEFT_OVER, "file-exists")])
def test_that_a_process_is_gone_is_the_cause_only_where_nothing_says_why(tmp_path: Path, lost: str, alone: str) -> None:
    assert code(tmp_path, lost + error(KEY)) == "key-missing"
    assert code(tmp_path, error(KEY) + lost) == "key-missing"
    assert code(tmp_path, lost) == alone
    assert code(tmp_path, error(KEY) + "{'loss': 2.1}\n" * 40 + lost) == alone


def test_a_compiler_that_a_shell_does_not_find_is_why_a_build_fails(tmp_path: Path) -> None:
    lacks = "/bin/sh: 1: nvcc: not found\n"
    assert code(tmp_path, lacks + error("RuntimeError: Error compiling objects for extension")) == "compiler-missing"


@pytest.mark.parametrize(
    "line",
    ["slurm_script: line 30:  4711 Killed   nvidia-smi --loop=5", "rm: cannot remove '/x': Permission denied"],
)
def test_how_a_script_cleans_up_after_an_exception_does_not_explain_it(tmp_path: Path, line: str) -> None:
    found = answer(tmp_path, f"{error(KEY)}{line}\n")
    assert found.cause is not None and (found.cause.code, found.line) == ("key-missing", KEY)
    assert [each.text for each, _ in found.followed] == [line]
