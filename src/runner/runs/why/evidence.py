"""Read one log: the lines that match a cause, with rank, time, and the frame of their traceback."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path

from runner.machine import files
from runner.runs.why import tracebacks
from runner.runs.why.cause import (
    CAUSE,
    EXCEPTION,
    IN_LOGS,
    SYMPTOM,
    Cause,
    by_word,
    cause_of,
    of_kind,
)
from runner.runs.why.log import (
    LINE_BYTES,
    Line,
    Scan,
    node_of,
    rank_of,
    scan,
    time_of,
    window,
    without_prefix,
)
from runner.runs.why.tracebacks import HEADER, Frame, Traceback

OWN_MESSAGE = (
    "runner-message"  # the row for errors of runner and its jobs, which contain a reason and a fix
)
SUMMARY = "Root Cause (first observed failure)"  # torch 2.13, torch/distributed/elastic/multiprocessing/errors
TIME_LIMIT = "DUE TO TIME LIMIT"  # slurmstepd
# an exception without a traceback
_BARE = re.compile(
    r"^\s{0,40}(?!LustreError: )(Exception|[A-Za-z_][\w.]{0,120}(?:Error|Exception))(?:: |$)"
)
_BARE_WORDS = ("Error: ", "Exception: ", "AssertionError", "NotImplementedError")
_BLOCK_BYTES = 256 << 10  # more than the longest traceback
_AFTER_LINES = 8  # the message of an exception may have several lines
_FRAMES_BYTES = 8 << 10
_LAST_ERROR_LINES = 5  # NCCL's message ends with `Last error:` and a line
_STARTER = re.compile(
    r"^(?:\s?\d{1,6}: )?(?:slurmstepd|srun|pyxis|enroot|\[(?:ERROR|WARN)\]|WARNING|FATAL)\b|^\[(?:ERROR|WARN)\]"
)
# a shell, or a tool that it runs: without `set -e`, a script goes on after each of these
_TOOL = re.compile(
    r"\S{1,400}: line \d{1,6}: |(?:\S{0,200}/)?-?(?:ba|da|k|z)?sh: "
    r"|(?:cat|chgrp|chmod|chown|cp|curl|du|find|grep|head|ln|ls|mkdir|mv|rm|rmdir|rsync|scp|sed|tail|tar|tee|touch"
    r"|unzip|wget|which): |fatal: unable to access |slurmstepd\S{0,80}: error: couldn't chdir to "
)
_DEATH = re.compile(r"\S{1,400}: line \d{1,6}: +\d+ ")  # `line 30:  4711 Killed  python train.py`
_PRINTS = re.compile(
    r"\s+(?:raise |print\(|(?:\w{1,40}\.){0,4}(?:warn|warning|error|info|debug|exception|critical)\()"
)
HARDWARE = {"gpu-ecc", "gpu-nvlink", "gpu-xid", "gpu-lost"}  # a program may go on for a while
NCCL_WARNING = "NCCL WARN "
_TERMINATED = (
    "what(): "  # C++ prints it when an exception ends a process, most often on its way out
)
_NEAR_LINES = 80  # how far from a line without a time to look for one
_IGNORED = "Exception ignored in"  # the traceback of a finalizer, which did not end the program
# the log level of a line (NCCL's WARN and Slurm's `error:` are errors), or a request that is retried
_NO_ERROR = re.compile(
    r"^(?:(?!NCCL|ERROR|FATAL|[Ee]rror:).){0,100}?(?:(?<![\w.-])(?:WARN(?:ING)?|INFO|DEBUG|[Ww]arning)(?:[\]\s:|)]|$)"
    r"|\b\w{1,40}Warning: |\[[WI](?:\d{3,4})? |^[WI]\d{4} )"
    r"|\{\"timestamp\":\"[^\"]{1,60}\",\"level\":\"(?:WARN|INFO|DEBUG)\""  # hf-xet, which is written in Rust
    r"|.{0,2000}thrown while requesting [A-Z]|.{0,2000}(?:CUDA error: driver shutting down|cudaErrorCudartUnloading)"
    r"|wandb: ERROR |A module that was compiled using NumPy|AttributeError: _ARRAY_API"
    r"|ERROR: This container was built for NVIDIA Driver"
)


@dataclass(frozen=True)
class Source:
    """A log to read."""

    path: Path
    start: int = 0
    """the byte offset at which the attempt begins"""
    rank: int | None = None
    """the rank, if the log belongs to one rank"""


@dataclass(frozen=True)
class Evidence:
    """A line that indicates a cause."""

    cause: Cause
    path: Path
    number: int
    text: str
    offset: int = 0
    rank: int | None = None
    node: str = ""
    time: datetime | None = None
    """the time in the line, or in a line shortly before it"""
    at: datetime = datetime.max
    """the time to sort by: its own, or that of the next evidence, or the file's modification time"""
    frame: Frame | None = None
    survived: bool = False
    """the program continued for a long time afterwards"""
    doubtful: bool = False
    """the program logged it as a warning: it applies only if there is no error"""
    handled: bool = False
    """another exception was raised while this one was handled"""
    outrun: bool = False
    """the program ran after this message about its start, or trained after this message that is not an exception"""
    from_tool: bool = False
    """a shell or one of its tools printed it"""

    @property
    def place(self) -> str:
        """`job.log:17`"""
        return f"{self.path}:{self.number}" if self.number else str(self.path)

    @property
    def on_exit(self) -> bool:
        """Whether C++ printed it while it ended the process."""
        return _TERMINATED in self.text and self.cause.code not in HARDWARE

    @property
    def order(self) -> tuple[datetime, str, int]:
        """The sort key: the time, and within a file the position."""
        return (self.at, str(self.path), self.offset)


@dataclass(frozen=True)
class Reading:
    """What one log contains."""

    source: Source
    evidence: tuple[Evidence, ...]
    scan: Scan
    first_rank: int | None = None
    """the rank that failed first according to torchrun"""
    first_node: str = ""


@cache
def _words() -> tuple[bytes, ...]:
    words = {word for cause in of_kind(*IN_LOGS) for word in cause.find}
    return tuple(sorted(word.encode() for word in {*words, *_BARE_WORDS, HEADER, SUMMARY}))


def read_log(source: Source) -> Reading:
    """Read a log. If it cannot be read, the result is empty."""
    result = scan(source.path, _words(), source.start)
    modified = datetime.fromtimestamp(files.modified(source.path) or time.time())
    kept = result.lines()
    blocks = _without_lost_processes(_tracebacks(source.path, kept), result)
    handled = {line.offset for line, _, is_handled in blocks if is_handled}
    last_traceback = max(
        (line.offset for line, block, _ in blocks if not block.ignored), default=-1
    )
    time_limit = max((line.offset for line in kept if TIME_LIMIT in line.text), default=-1)
    found, explained, outran = [], set(), set()
    for line in kept:
        if _says_nothing(line, blocks):
            continue
        cause = cause_of(line.text, partial(_frames_above, line)) or _bare_exception(line, blocks)
        if cause is None:
            continue
        if cause.code == OWN_MESSAGE:
            found += _own_message(line, cause, source, result)
            continue
        block = _block_of(line, blocks)
        after = block is not None and line.number > block[0].number + block[1].last
        if after and _is_apart(line, cause):
            block = None
        if block:
            explained.add(block[0].offset)
        each = _evidence(line, cause, source, result, block[1] if block else None)
        outrun = _is_outrun(
            line, cause, block is not None, result, last_traceback, again=cause.code in outran
        )
        if outrun:
            outran.add(cause.code)
        each = replace(
            each,
            handled=block is not None and block[0].offset in handled,
            outrun=outrun or _went_on(line, max(last_traceback, time_limit)),
        )
        found.append(_with_reason(each))
    found += [
        _unknown(*_origin(line, block, blocks), source, result)
        for line, block, is_handled in blocks
        if line.offset not in explained and not is_handled and not block.ignored
    ]
    rank, node = _summary(source.path, kept)
    timed = _with_times(_messages(sorted(found, key=lambda each: each.offset)), modified)
    return Reading(source, tuple(timed), result, rank, node)


def _evidence(
    line: Line, cause: Cause, source: Source, result: Scan, block: Traceback | None
) -> Evidence:
    rank = rank_of(line.text, source.path)
    if rank is None and block:
        rank = rank_of(block.prefix)
    return Evidence(
        cause=cause,
        path=line.path,
        number=line.number,
        text=line.text.strip(),
        offset=line.offset,
        rank=source.rank if rank is None else rank,
        node=node_of(line.text),
        frame=block.frame if block else None,
        survived=result.survived(line),
        doubtful=_is_no_error(line),
        from_tool=_is_from_tool(line),
    )


def _is_outrun(
    line: Line, cause: Cause, in_traceback: bool, result: Scan, last_traceback: int, *, again: bool
) -> bool:
    """Whether the program ran after a line about the start, or trained after a line that is not an exception; `again`:
    it trained after an earlier line of the same cause."""
    trained = result.progress > line.progress
    if cause.phase == "start" or (cause.subject == "container" and _STARTER.match(line.text)):
        return trained or line.offset < last_traceback
    exception = in_traceback or _BARE.match(without_prefix(line.text)[1])
    return (trained or again) and not exception and cause.code not in HARDWARE


def _is_apart(line: Line, cause: Cause) -> bool:
    """Whether a line below an exception does not belong to it: other programs, or this one on its way out, print it."""
    return (
        cause.kind != CAUSE
        or cause.phase == "start"
        or any(word in line.text for word in (_TERMINATED, NCCL_WARNING))
        or _is_from_tool(line)
        or _is_no_error(line)
    )


def _is_no_error(line: Line) -> bool:
    return _NO_ERROR.match(without_prefix(line.text)[1]) is not None


def _is_from_tool(line: Line) -> bool:
    return _TOOL.match(without_prefix(line.text)[1]) is not None


def _went_on(line: Line, last_end: int) -> bool:
    """Whether the script went on after this message of a shell or tool, and something else ended it later."""
    died = _DEATH.match(without_prefix(line.text)[1])
    return _is_from_tool(line) and not died and line.offset < last_end


def _messages(found: Sequence[Evidence]) -> list[Evidence]:
    """The same without the source code that prints or raises a message, if the message or another one follows."""
    kept = []
    for index, each in enumerate(found):
        later = [
            after
            for after in found[index + 1 :]
            if (after.path, after.rank) == (each.path, each.rank)
        ]
        near = [after for after in later if after.number - each.number < _AFTER_LINES]
        said = any(after.cause.code == each.cause.code for after in near)
        if not (near and _is_source(each, near[0] if not said else None)):
            kept.append(each)
    return kept


def _is_source(each: Evidence, other: Evidence | None) -> bool:
    """Whether a line is the code that a traceback shows below a frame; if another message follows, one that prints."""
    before = window(each.path, each.offset - 2048, min(each.offset, 2048))
    frame = (
        len(before) > 1 and before[-1] == "" and tracebacks.is_frame(without_prefix(before[-2])[1])
    )
    code = without_prefix(window(each.path, each.offset, LINE_BYTES)[0])[1]
    if not code.startswith((" ", "\t")) or not (frame or code.lstrip().startswith("raise ")):
        return False
    return other is None or _PRINTS.match(code) is not None


def _with_reason(each: Evidence) -> Evidence:
    """The evidence with the line that names the reason. NCCL prints it after `Last error:`, enroot before the hook."""
    if each.cause.subject == "nccl" and each.cause.kind == SYMPTOM:
        lines = window(each.path, each.offset, 4096)[:_LAST_ERROR_LINES]
        for index, line in enumerate(lines[:-1]):
            if without_prefix(line)[1].strip() == "Last error:" and lines[index + 1].strip():
                text = lines[index + 1].strip()
                return replace(
                    each,
                    cause=cause_of(text) or each.cause,
                    number=each.number + index + 1,
                    text=text,
                )
    if each.cause.code == "enroot-hook" and each.offset:
        above = window(each.path, each.offset - 2048, min(each.offset, 2048))[-2:-1]
        if above and "[ERROR]" in above[0]:
            cause = each.cause.filled(
                each.cause.placeholders(each.text)
            )  # the hook's name is not in the line above
            return replace(each, cause=cause, number=each.number - 1, text=above[0].strip())
    return each


def _says_nothing(line: Line, blocks: Sequence[tuple[Line, Traceback, bool]]) -> bool:
    """Whether to ignore a line: it is source code in a traceback, or belongs to an ignored traceback."""
    prefix, text = without_prefix(line.text)
    for header, block, _ in blocks:
        if prefix == block.prefix and 0 < (after := line.number - header.number) <= block.last:
            return block.ignored or (after < block.last and text.startswith((" ", "\t")))
    return False


def _frames_above(line: Line) -> str:
    """The frames of the traceback above a line, as text; the header may be missing, and ranks may be mixed."""
    text = "\n".join(
        window(line.path, line.offset - _FRAMES_BYTES, min(_FRAMES_BYTES, line.offset))
    )
    frames = text[text.rfind(HEADER) + 1 :].splitlines()[-_NEAR_LINES:]
    return "\n".join(frame for frame in frames if without_prefix(frame)[1].strip(" ^~"))


def _bare_exception(line: Line, blocks: Sequence[tuple[Line, Traceback, bool]]) -> Cause | None:
    """The cause for an exception whose traceback is missing or incomplete in the log."""
    found = _BARE.match(without_prefix(line.text)[1])
    if found is None or any(
        0 <= line.number - header.number <= block.last for header, block, _ in blocks
    ):
        return None
    return _by_class(found[1])


def _by_class(exception: str) -> Cause | None:
    return by_word(EXCEPTION, exception.rsplit(".", 1)[-1]) or by_word(EXCEPTION, "*")


def _own_message(because: Line, cause: Cause, source: Source, result: Scan) -> list[Evidence]:
    """The evidence of an error of runner itself: `what` is the line before `because:`, the fix after `try:`."""
    before = window(because.path, because.offset - 2048, min(because.offset, 2048))
    lines = [without_prefix(line)[1] for line in window(because.path, because.offset, 4096)]
    last = next((index for index, line in enumerate(lines) if line.startswith("  try: ")), None)
    if last is None or len(before) < 2:
        return []
    why = " ".join(line.strip() for line in lines[:last]).removeprefix("because:").strip()
    fix = lines[last].strip().removeprefix("try:").strip()
    what = replace(because, number=because.number - 1, text=before[-2])
    return [_evidence(what, replace(cause, explanation=why, fix=fix), source, result, None)]


def _origin(
    header: Line, block: Traceback, blocks: Sequence[tuple[Line, Traceback, bool]]
) -> tuple[Line, Traceback]:
    """The traceback, or, if its class says nothing, the one that caused it directly and whose class says more."""
    unknown = by_word(EXCEPTION, "*")
    if _by_class(block.exception) != unknown:
        return header, block
    for line, inner, _ in blocks:
        if inner.caused is not None and line.number + inner.caused == header.number:
            found = _origin(line, inner, blocks)
            return found if _by_class(found[1].exception) != unknown else (header, block)
    return header, block


def _unknown(header: Line, block: Traceback, source: Source, result: Scan) -> Evidence:
    """The evidence for a traceback that matches no cause except by the class of its exception."""
    cause = _by_class(block.exception)
    assert cause is not None  # the table has a row that matches every exception
    text = (
        f"{block.prefix}{block.exception}: {block.message}"
        if block.message
        else f"{block.prefix}{block.exception}"
    )
    line = replace(header, number=header.number + block.last, text=text)
    return _evidence(line, cause, source, result, block)


def _tracebacks(path: Path, kept: Sequence[Line]) -> list[tuple[Line, Traceback, bool]]:
    """(the header line, the traceback, whether another exception was raised while this one was handled)."""
    found = []
    for line in kept:
        if HEADER not in line.text:
            continue
        lines = window(path, line.offset, _BLOCK_BYTES)
        block = tracebacks.read(lines, 0) if lines else None
        if block is None:
            continue
        before = window(path, line.offset - 400, min(line.offset, 400))[-2:-1]
        block = replace(block, ignored=any(_IGNORED in text for text in before))
        next_at = tracebacks.handled_by(lines, block)
        if tracebacks.caused_by(lines, block, next_at):
            block = replace(block, caused=next_at)
        found.append((line, _with_users_frame(lines, block, next_at), next_at is not None))
    return found


def _without_lost_processes(
    blocks: Sequence[tuple[Line, Traceback, bool]], result: Scan
) -> list[tuple[Line, Traceback, bool]]:
    """The tracebacks; one that says only that another process ended is ignored, if there is one that says more."""
    says_more = any(
        not (block.lost_process or block.ignored or is_handled or result.survived(line))
        for line, block, is_handled in blocks
    )
    return [
        (line, replace(block, ignored=block.ignored or (says_more and block.lost_process)), handled)
        for line, block, handled in blocks
    ]


def _with_users_frame(lines: Sequence[str], block: Traceback, next_at: int | None) -> Traceback:
    """The traceback. If all its frames are in libraries, it gets those of the exception that was being handled."""
    for _ in range(8):
        if next_at is None or block.frame:
            break
        outer = tracebacks.read(lines, next_at)
        if outer is None:
            break
        if outer.frame:
            return replace(block, frames=outer.frames)
        next_at = tracebacks.handled_by(lines, outer)
    return block


def _block_of(
    line: Line, blocks: Sequence[tuple[Line, Traceback, bool]]
) -> tuple[Line, Traceback] | None:
    """The traceback to whose exception a line belongs."""
    for header, block, _ in reversed(blocks):
        after = line.number - header.number - block.last
        own = after <= 0 or (after <= _AFTER_LINES and without_prefix(line.text)[0] == block.prefix)
        if header.number < line.number and own:
            return header, block
    return None


def _summary(path: Path, kept: Sequence[Line]) -> tuple[int | None, str]:
    """(rank, host) of the first failure in torchrun's summary."""
    for line in kept:
        if SUMMARY in line.text:
            block = "\n".join(window(path, line.offset, 4096)[:10])
            rank = re.search(r"^\W*rank\s*: (\d{1,6})", block, re.MULTILINE)
            host = re.search(r"^\W*host\s*: (\S{1,64})", block, re.MULTILINE)
            return (int(rank[1]) if rank else None), (host[1] if host else "")
    return None, ""


def _with_times(found: Sequence[Evidence], modified: datetime) -> list[Evidence]:
    """The same with a time each: the line's own, else that of a line before it, after it, of the next evidence, or of
    the file's last change (what died first has written last the longest ago)."""
    ahead, year = modified, modified.year
    timed: list[Evidence] = []
    for each in reversed(found):
        own = time_of(each.text, year) or _near(each, year)
        ahead = own or ahead
        timed.append(replace(each, time=own, at=ahead))
    return timed[::-1]


def _near(each: Evidence, year: int) -> datetime | None:
    if each.offset == 0:
        return None
    before = window(each.path, each.offset - 16384, min(16384, each.offset))[-_NEAR_LINES:]
    return next((found for line in reversed(before) if (found := time_of(line, year))), None)


_WORDS = (
    b"rror",
    b"ERR",
    b"FATAL",
    b"atal",
    b"ailed",
    b"AILED",
    b"annot",
    b"denied",
    b"illed",
    b"bort",
    b"o such",
    b"panic",
    b"xception",
    b"nable to",
    b"ot found",
    b"imed out",
    b": line ",
)
_WEIGHTS = (
    (re.compile(r"(?i)\b(fatal|panic|abort(ed|ing)?|killed|core dumped)\b"), 4),
    (re.compile(r"^(\[rank ?\d+\]: ?|\d+: )?[\w.]{1,120}(Error|Exception)\b"), 4),
    (re.compile(r"\bNCCL WARN\b"), 4),
    (
        re.compile(
            r"(?i)\b(error|exception|failed|failure|cannot|denied|unable|timed out|no such|not found)\b"
        ),
        2,
    ),
    (re.compile(r"^\S{1,400}: line \d{1,6}: "), 3),  # a shell
    (re.compile(r"(?i)\b(warn(ing)?|deprecat|info|debug|retry)"), -2),
    (
        re.compile(
            r"(?i)\b(0 errors?|no errors?|errors?[=:] ?0|failed[=:] ?0|0 failed|ignor|fall(ing)? back)\b"
        ),
        -6,
    ),
)
UNKNOWN = Cause("unknown", "", "", "", "")
_LAUNCHER = re.compile(  # messages that torchrun and its launchers print for any failure
    r"^\S{1,400} FAILED$|Last error:$|^│|^ *raise \w+\(|Root Cause \(first|^  (exitcode|error_file|traceback) +: "
    r"|Reporting training FAILURE|exit(ed|ing)? with (a )?(non-?zero )?(exit )?(code|status)\b"
)
_MOST = 8
_LAST = 5
_TAIL_BYTES = 16 << 10
_OWN = ("job.sbatch: ", "runner: ", "preflight: ")  # messages of our own batch script


def telling_lines(sources: Sequence[Source]) -> tuple[Evidence, ...]:
    """The lines most likely to explain the failure, in order, among those that match no cause; may be empty."""
    weighed: list[tuple[int, Evidence]] = []
    seen: set[str] = set()
    for source in sources:
        found = scan(source.path, _WORDS, source.start)
        for line in found.lines():
            shape = re.sub(r"\d+", "0", line.text.strip())[:200]
            weight = sum(value for pattern, value in _WEIGHTS if pattern.search(line.text))
            silent = (
                line.text.startswith(_OWN) or _LAUNCHER.search(line.text) or cause_of(line.text)
            )
            if weight > 0 and shape not in seen and not silent and not found.survived(line):
                seen.add(shape)
                short = replace(line, text=line.text.strip()[:400])
                weighed.append((weight, _evidence(short, UNKNOWN, source, found, None)))
    best = sorted(weighed, key=lambda each: (-each[0], -each[1].offset))[:_MOST]
    return tuple(sorted((each for _, each in best), key=lambda each: (str(each.path), each.offset)))


def last_lines(sources: Sequence[Source]) -> tuple[Evidence, ...]:
    """The last lines of the first log, without lines of the batch script."""
    for source in sources[:1]:
        size = source.path.stat().st_size
        found = window(source.path, max(source.start, size - _TAIL_BYTES), _TAIL_BYTES)
        kept = [line for line in found if line.strip() and not line.startswith(_OWN)][-_LAST:]
        return tuple(Evidence(UNKNOWN, source.path, 0, line.strip()[-400:]) for line in kept)
    return ()
