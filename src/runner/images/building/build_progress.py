"""Reads an engine's build output: which step it is at, and what that step printed last."""

from __future__ import annotations

import re
from collections import deque

from runner.machine.report import Report

# podman: "STEP 3/7: RUN x", with several stages "[1/2] STEP 3/7: RUN x"; docker's classic builder: "Step 3/7 : RUN x";
# BuildKit's plain progress: "#7 [build 3/7] RUN x"
_STEP = re.compile(
    r"^(?:\[(?P<stage>\d+/\d+)\] )?step (?P<step>\d+/\d+) ?: (?P<words>.*)"
    r"|^#\d+ \[(?:(?P<name>\S+) )?\s*(?P<kit>\d+/\d+)\] (?P<kit_words>.*)",
    re.IGNORECASE,
)
_KEPT_LINES = 15


class BuildProgress:
    """Tells a report of each step as it begins, and keeps the last lines of the current one."""

    def __init__(self, report: Report, *, hide_arguments: bool = False) -> None:
        """`hide_arguments`: our own ARG stands behind each FROM; it is neither shown nor counted."""
        self.report = report
        self.hide_arguments = hide_arguments
        self.step = ""
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def line(self, text: str) -> None:
        """Take one line of the build's output."""
        if found := _STEP.match(text):
            self._begin(found)
        elif text.strip():
            self.last_lines.append(text)
            self._passing(text)

    def end(self) -> None:
        """The build is over: take the passing line away."""
        self._passing("")

    def _begin(self, found: re.Match[str]) -> None:
        stage = found["stage"] or found["name"] or ""
        number, total = (int(part) for part in (found["step"] or found["kit"]).split("/"))
        words = found["words"] or found["kit_words"] or ""
        if self.hide_arguments and words.startswith("ARG ") and number == 2:
            return
        # our one LABEL is the last instruction of the last stage
        last_stage = "/" not in stage or len(set(stage.split("/"))) == 1
        if last_stage and number == total and words.startswith("LABEL "):
            return
        total -= self.hide_arguments + last_stage
        number -= self.hide_arguments and number > 1
        self.step = f"step {number}/{total}{f' of stage {stage}' if stage else ''}: {words}"
        self.last_lines.clear()
        self.report.say(_short(self.step))

    def _passing(self, text: str) -> None:
        """A line that the next one replaces, where the report can do that."""
        show = getattr(self.report, "passing", self.report.detail)
        if text or show != self.report.detail:
            show(text)


def _short(text: str, width: int = 110) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= width else one_line[: width - 1] + "…"
