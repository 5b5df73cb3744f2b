"""The causes are data: each is complete, matches its own real message and not its near miss, and cannot run away."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.runs.why import cause as causes
from runner.runs.why.cause import EXCEPTION, EXIT, PENDING, Cause, all_causes, by_word, cause_of
from runner.runs.why.log import LINE_BYTES

IN_LOGS = [cause for cause in all_causes() if cause.kind in causes.IN_LOGS]


def test_each_cause_has_a_code_of_its_own() -> None:
    codes = [cause.code for cause in all_causes()]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code) for code in codes)


def test_a_cause_says_what_why_and_what_to_do() -> None:
    for cause in all_causes():
        assert cause.says and cause.explanation.endswith(".") and cause.fix and cause.find, cause
        assert cause.kind in causes.KINDS, cause
        assert not cause.says.endswith(".") and len(cause.says) < 120, cause
        assert len(cause.explanation.split()) <= 20, cause  # one short sentence


def test_a_cause_yields_only_to_causes_that_exist() -> None:
    codes = {cause.code for cause in all_causes()}
    assert {code for cause in all_causes() for code in cause.yields} <= {*codes, "*"}
    assert {cause.phase for cause in all_causes()} == {"", "start"}


def test_a_cause_knows_its_own_message_and_no_other_cause_takes_it() -> None:
    found = {cause.code: cause_of(cause.message) for cause in IN_LOGS}
    assert not [(code, other and other.code) for code, other in found.items() if other is None or other.code != code]


def test_a_near_miss_does_not_match() -> None:
    assert not [cause for cause in IN_LOGS if not cause.near_miss or cause.fits(cause.near_miss)]


@pytest.mark.parametrize(
    "line",
    [
        "No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'",  # torch.utils.cpp_extension in a CPU job
        "ERROR: ld.so: object 'libxalt_init.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file): "
        "ignored.",
    ],
)
def test_a_message_after_which_the_program_goes_on_is_no_cause(line: str) -> None:
    assert cause_of(line) is None


def test_every_message_has_a_source() -> None:
    """Where it was seen: a public thread, the program that was made to print it, or the text of that program."""
    seen = re.compile(r"^[\w.-]+/[\w.-]+#\d+|^[^,]+, provoked|^text of \w")
    assert not [(cause.code, cause.source) for cause in IN_LOGS if not seen.search(cause.source)]


def test_no_pattern_runs_away() -> None:
    """The longest line that is ever shown to a pattern, made of what the pattern likes, costs milliseconds."""
    for cause in (each for each in IN_LOGS if each.match or each.unless):
        pieces = [*cause.find, cause.message, "a" * 50, " ", ": ", "[0]", "/x", "error: ", "0", "fe80:", "task 1"]
        for length in (256, 1024, LINE_BYTES):  # growing: a pattern that explodes is seen before it takes for ever
            for piece in pieces:
                line = (cause.find[0] + piece * (length // max(len(piece), 1)))[:length]
                assert any(_cpu_seconds(cause, line) < 0.1 for _ in range(3)), (cause.code, piece, length)


PAYLOAD = causes.FOLDER.parents[1] / "payload"
FAULTS = {"gpu-ecc": "gpu", "gpu-nvlink": "gpu", "gpu-xid": "gpu", "gpu-lost": "gpu", "nccl-timeout": "network"}
"""the causes after which the batch script avoids a node -> the word of payload/faults.awk"""
WORDINGS = (Path(__file__).parent / "why/wordings.txt").read_text().splitlines()


def fault(line: str) -> str:
    """What the batch script makes of a line: `gpu`, `network` or nothing."""
    program = (shutil.which("awk") or "", "-f", str(PAYLOAD / "faults.awk"))
    found = subprocess.run(program, input=f"{line}\n", capture_output=True, text=True, check=True, timeout=60).stdout
    return found.partition(" ")[0]


def test_the_batch_script_and_why_agree_about_faults_of_the_machine() -> None:
    """The lines of each cause in the batch script's patterns."""
    lines = [(cause.code, cause.message) for cause in IN_LOGS]
    lines += [(code, text) for code, _, text in (line.partition(": ") for line in WORDINGS)]
    assert {(code, fault(text)) for code, text in lines if code in FAULTS} == set(FAULTS.items())
    misses = [cause.near_miss for cause in IN_LOGS if cause.code in FAULTS]
    assert fault("\n".join([text for code, text in lines if code not in FAULTS] + misses)) == ""


def test_why_knows_each_pattern_of_the_batch_script() -> None:
    """The batch script's patterns in the causes, with the same exceptions."""
    program = (PAYLOAD / "faults.awk").read_text()
    simple = {r"\(": "(", r"\)": ")", "[0-9A-Fa-f:.]+": "0000:01:00", "[0-9]+": "79", "(recv|send)": "recv"}
    simple |= {"[Uu]": "u", "[HRX]": "R"}
    patterns = re.findall(r"^/(.*?)/ [{&]", program, re.MULTILINE)
    assert len(patterns) == program.count(" ? ")
    for pattern in patterns:
        for old, new in simple.items():
            pattern = pattern.replace(old, new)
        for line in pattern.split("|"):
            cause = cause_of(line)
            assert cause and fault(line) == FAULTS[cause.code], line
    (xid,) = [cause for cause in IN_LOGS if cause.code == "gpu-xid"]
    texts = (program, (PAYLOAD / "check.sh").read_text(), xid.unless)
    assert len({number for text in texts for number in re.findall(r"\([0-9]+(?:\|[0-9]+)+\)", text)}) == 1


@pytest.mark.parametrize(("before", "expected"), [("", ""), (" 31", ""), (" 79", "gpu"), (" 139", "gpu")])
def test_an_error_that_follows_another_one_counts_as_that_one(before: str, expected: str) -> None:
    """The driver ends the program of a broken GPU with an Xid that programs themselves cause, too."""
    line = f"NVRM: Xid (PCI:0000:dc:00): 45, pid=9, name=python3, Ch 00000001 caused by previous Xid{before}"
    cause = cause_of(line)
    assert (fault(line), cause.code if cause else "") == (expected, "gpu-xid" if expected else "")


def _cpu_seconds(cause: Cause, line: str) -> float:
    """What one look costs; a busy machine now and then doubles it."""
    start = time.process_time()
    cause.fits(line)
    return time.process_time() - start


def test_exceptions_exit_codes_and_reasons_have_a_row_for_what_nobody_foresaw() -> None:
    assert by_word(EXCEPTION, "*") and by_word(PENDING, "*") and by_word(PENDING, "")


@pytest.mark.parametrize(
    "reason",
    ["Priority", "Resources", "Dependency", "DependencyNeverSatisfied", "BeginTime", "JobHeldUser", "JobHeldAdmin",
     "PartitionDown", "BadConstraints", "JobArrayTaskLimit", "ReqNodeNotAvail", "PartitionTimeLimit",
     "PartitionNodeLimit", "QOSMaxJobsPerUserLimit", "AssocGrpCPUMinutesLimit", "Reservation", "Licenses"],
)  # fmt: skip
def test_every_common_reason_for_waiting_has_its_own_row(reason: str) -> None:
    found = by_word(PENDING, reason)
    assert found is not None and found.code != "pending-unknown"


@pytest.mark.parametrize("code", [126, 127, 134, 135, 137, 139, 143])
def test_exit_codes_of_signals_and_shells_are_known(code: int) -> None:
    assert by_word(EXIT, str(code)) is not None


def listed(*words: str, verb: tuple[str, ...] = ("why", "--list")) -> list[str]:
    """What runner prints for the words, line by line."""
    argv = (sys.executable, "-m", "runner", *verb, *words)
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_list_has_every_cause_with_its_words() -> None:
    assert listed() == [f"{cause.code}: {cause.says}" for cause in all_causes()]
    records = json.loads("\n".join(listed("--json")))
    assert [each["code"] for each in records] == [cause.code for cause in all_causes()]


def test_one_cause_is_listed_with_its_reason_and_fix_and_a_part_of_a_name_with_all_that_contain_it() -> None:
    timeout = next(cause for cause in all_causes() if cause.code == "nccl-timeout")
    rest = [f"  because: {timeout.explanation}", f"  try:     {timeout.fix}"]
    assert listed("nccl-timeout") == [f"nccl-timeout: {timeout.says}", *rest]
    assert {"nccl-timeout", "nccl-ofi"} < {line.partition(":")[0] for line in listed("NCCL")}
    argv = (sys.executable, "-m", "runner", "why", "--list", "nccll")
    refused = subprocess.run(argv, capture_output=True, text=True)
    assert refused.returncode == 1 and "no cause contains 'nccll'" in refused.stderr


def test_the_causes_are_completed() -> None:
    words = ("completion", "words", "--", "why", "--list")
    assert listed("nccl-t", verb=words) == ["nccl-timeout"]
