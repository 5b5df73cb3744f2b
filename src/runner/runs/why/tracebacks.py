"""Find Python tracebacks in a log: their extent, their exception, and the innermost frame of the user's code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runner.runs.why.log import without_prefix

HEADER = "Traceback (most recent call last)"
_FRAME = re.compile(r'^\s*File "([^"]{1,1024})", line (\d{1,9})(?:, in (.{1,200}))?')
_BOXED = re.compile(
    r"^│ (/[^:]{1,1024}):(\d{1,9}) in (\S{1,200})"
)  # rich draws a box around its frames
_BOX = ("│", "╭", "╰")
_EXCEPTION = re.compile(
    r"^([A-Za-z_][\w.]{0,120}?(?:Error|Exception|Exit|Interrupt|Warning|Timeout|Failure|[A-Z]\w*))(?::\s?(.*))?$"
)
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_FOREIGN = re.compile(
    r"site-packages|dist-packages|/lib(?:64)?/python\d|^<|^/usr/lib|/bin/\w{1,40}$"
)


_QUEUES = re.compile(
    r"/multiprocess(?:ing)?/(?:connection|managers|queues|util|resource_sharer)\.py$"
)
_GONE = {
    "BrokenPipeError",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "EOFError",
    "FileNotFoundError",
    "OSError",
}


@dataclass(frozen=True)
class Frame:
    """A place in the code."""

    file: str
    line: int
    function: str = ""
    code: str = ""


@dataclass(frozen=True)
class Traceback:
    """One traceback, including those of the exceptions that caused it."""

    first: int
    """index of its first line"""
    last: int
    """index of the line with the exception"""
    exception: str
    message: str
    frames: tuple[Frame, ...]
    prefix: str = ""
    """the launcher's prefix of its lines"""
    caused: int | None = None
    """how many lines after its header the traceback begins that it was the direct cause of (`raise … from`)"""
    ignored: bool = False
    """Python printed it and continued, because a finalizer raised it"""

    @property
    def lost_process(self) -> bool:
        """Whether a queue, pipe or temporary folder of multiprocessing fails: most often because a process ended."""
        inner = self.frames[-1].file if self.frames else ""
        return _QUEUES.search(inner) is not None and self.exception in _GONE

    @property
    def frame(self) -> Frame | None:
        """The innermost frame of the user's code; None if all frames are in installed packages or Python itself."""
        return next(
            (frame for frame in reversed(self.frames) if not _FOREIGN.search(frame.file)), None
        )


def read(lines: Sequence[str], start: int) -> Traceback | None:
    """The traceback whose header is at index `start`. Lines of other ranks in between are skipped."""
    prefix, header = without_prefix(lines[start])
    indent = len(header) - len(header.lstrip())
    frames: list[Frame] = []
    for index in range(start + 1, len(lines)):
        mark, text = without_prefix(lines[index])
        if mark != prefix:
            continue
        text = text[indent:] if text[:indent].isspace() else text
        if found := _FRAME.match(text) or _BOXED.match(text):
            frames.append(Frame(found[1], int(found[2]), found[3] or ""))
        elif text.startswith((" ", "\t", *_BOX)) or not text:
            if frames and not frames[-1].code and text.strip(" ^~") and not text.startswith(_BOX):
                frames[-1] = Frame(
                    frames[-1].file, frames[-1].line, frames[-1].function, text.strip()[:200]
                )
        elif ending := _EXCEPTION.match(text):
            return Traceback(
                start, index, ending[1], (ending[2] or "").strip(), tuple(frames), prefix
            )
        elif frames:
            return None  # incomplete, or mixed with lines of another process that cannot be distinguished
    return None


def caused_by(lines: Sequence[str], inner: Traceback, outer: int | None) -> bool:
    """Whether the traceback at index `outer` was raised from the inner one, not only while that one was handled."""
    return outer is not None and any(_CHAIN[1] in line for line in lines[inner.last + 1 : outer])


def is_frame(text: str) -> bool:
    """Whether a line, without a launcher's prefix, names a place in the code."""
    return _FRAME.match(text) is not None


def handled_by(lines: Sequence[str], after: Traceback) -> int | None:
    """The index of the traceback that was raised while this one was handled, or from it; None for the last one.

    A handled exception did not end the program, and its frames may all be in libraries.
    """
    chained = False
    for index in range(after.last + 1, min(after.last + 40, len(lines))):
        chained = chained or any(words in lines[index] for words in _CHAIN)
        if HEADER in lines[index]:
            return index if chained else None
    return None
