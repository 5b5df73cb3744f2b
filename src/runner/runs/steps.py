"""What a trainer printed, line by line: its steps, losses and speed.

The reader gets the text of one or several logs, in the order in which it was written. It keeps a small state, so that a
log can be read in parts: what it finds does not depend on where the parts begin.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

from runner.runs.patterns import (
    BARS,
    GENERIC,
    Line,
    Number,
    Plans,
    Trainer,
    has_one,
    number_after,
    usable,
)

Values = dict[str, Number]
"""what was found in a line; the keys are those of a trainer's table [[lines]]"""
SIGN_SECONDS = 5.0
"""of steps without a loss, one per this many seconds is kept"""
_LONGEST_LINE = 20_000
_LARGEST_STEP = 10**15
_OF_TRAINER = ("total", "sequence_length", "batch_size")
"""values that hold for all steps, and may be printed before the first one"""
_NOT_KEPT = frozenset((*_OF_TRAINER[:1], "step", "loss"))

_OTHER_LOSS = re.compile(
    r"(?:^|[^A-Za-z])(?:[Vv]alidation|[Vv]alid|[Vv]al|VAL|[Ee]valuation|[Ee]val|[Tt]est|[Dd]ev|[Cc][Vv])"
    r"[_ /.-]*[A-Za-z_]*[Ll]oss"
    r"""[\]"':=|( ]*(?:[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?|[a-z]+)"""
)
"""the loss of something other than the training"""
_OTHER_WORDS = ("al", "AL", "est", "ev", "cv", "CV")
"""one of these is in each of its names"""
_WHOLE_LOSS = r"""(^|[^A-Za-z_/])[Ll]oss[]"':=|( ]+"""
"""the text before the loss itself, and not a part of it"""
# torchrun --tee, also in the middle of a line
_TEE = re.compile(r"\[default[0-9]+\]:")
# tqdm clears its bar before a text and draws it again after the text; `ESC [A` ends the clearing of another bar
_CLEARED = re.compile(r" +(\x1b\[A)?")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LABELS = tuple(
    map(
        re.compile,
        (
            r" *[0-9]+: ",  # srun --label
            r"\([A-Za-z0-9_.-]+,?(?: rank=[0-9]+,)? pid=[0-9]+[^)]*\) ",  # Ray, SkyPilot
            r"\[(?:rank *)?[0-9,]+\](?:<std(?:out|err)>)?: ?",  # a rank of torch, mpirun --tag-output
        ),
    )
)
_LINE_ENDS = str.maketrans("\r\0", "\n\n")
_UNITS = (
    # the time of a step and the mean; `data` is a part of it
    (re.compile(r" *\([ 0-9.]+\)|s, | +data"), "step_seconds"),
    (re.compile(r" ?s/(?:it|iter|step|batch|ba)"), "step_seconds"),
    (re.compile(r" ?ms/(?:it|iter|step|batch|ba)"), "step_milliseconds"),
    (re.compile(r" ?(?:it|iters?|steps?|batch|batches|ba)/s"), "steps_per_second"),
)
_ELAPSED = re.compile(r"\[([0-9:]+)<")
_STEP_OR_ITERATION = re.compile(r"([Ss]tep|[Ii]ter)[^(]")


class Piece(NamedTuple):
    """A part of a log, in complete lines."""

    log: str
    """the path of the log in the run folder"""
    text: str
    """in latin-1"""
    begun: float
    """when its first byte was written, in Unix seconds"""
    ended: float
    """when its last byte was written"""


@dataclass
class Bar:
    """The progress bar without an epoch that is followed. A bar that starts again is the next epoch."""

    steps: int | None = None
    """the length; None: none was found yet"""
    log: str = ""
    step: int = 0
    seconds: float = 0.0
    """how long it has been drawn"""
    pace: float = 0.0
    """seconds per step"""
    before: int = 0
    """the steps of the epochs before"""
    epoch_seconds: float = 0.0
    """how long the epoch before took"""
    successor: int | None = None
    """the length of a bar that began when this one was almost complete"""


@dataclass
class Seen:
    """What is known of the lines of one trainer."""

    step: int | None = None
    """the newest step, with or without a loss"""
    time: float = 0.0
    log: str = ""
    """where the step was"""
    total: Number | None = None
    sequence_length: Number | None = None
    batch_size: Number | None = None
    pace: Number | None = None
    """seconds per step"""
    drawn: int | None = None
    """the step of the newest bar that was drawn again after a text"""
    waiting: Values = field(default_factory=dict)
    """values whose step was not printed yet"""
    epoch: Number | None = None
    """from a line of its own, or from the newest line with a step"""
    epochs: Number | None = None
    epoch_step: int = 0
    """the highest step of the epoch, on lines without the steps per epoch"""
    interval: int = 0
    """the steps between two lines of the epoch"""
    length: int = 0
    """the steps of the epoch before; 0: not known, or the step count does not restart"""
    before: int = 0
    """the steps of all epochs before, if the step count restarts at each epoch"""


@dataclass
class Entry:
    """A step that was found, which may not be complete yet: a later line may have more about it."""

    trainer: str
    log: str
    values: Values
    time: float


@dataclass
class State:
    """What the reader keeps between two parts of a log."""

    trainer: str = ""
    """the trainer whose lines are read; empty: not known yet"""
    reported: str = ""
    """the trainer of the newest entry"""
    step: int | None = None
    """the newest step with a loss"""
    step_log: str = ""
    shown: int | None = None
    """the newest step that was kept"""
    shown_at: float | None = None
    heading: Number | None = None
    """a step on a line of its own, before its values"""
    cleared: bool = False
    """whether a bar was cleared, so that the next one is drawn again"""
    first_epoch: int | None = None
    """0 or 1; programs count epochs from either"""
    epoch: Number | None = None
    epoch_step: Number = 0
    steps_go_on: bool = False
    """whether the steps of an epoch continue those of the epoch before"""
    bar: Bar = field(default_factory=Bar)
    newest: Entry | None = None
    """the entry to which the next line may add something"""
    of: dict[str, Seen] = field(default_factory=dict)
    """trainer -> what is known of its lines"""

    def record(self) -> dict[str, Any]:
        """What `from_record` takes, for JSON."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> State:
        """Raises TypeError or KeyError for a record of another version."""
        newest = record["newest"]
        parts = {
            "bar": Bar(**record["bar"]),
            "newest": Entry(**newest) if newest else None,
            "of": {name: Seen(**seen) for name, seen in record["of"].items()},
        }
        return cls(**{**record, **parts})


@dataclass
class _Text:
    """The line that is being read."""

    text: str
    log: str
    time: float
    tee: bool
    """whether torchrun printed it, which takes stdout and stderr on different ways"""

    @cached_property
    def training(self) -> str:
        """The text without the losses of validations."""
        may_have = "oss" in self.text and has_one(_OTHER_WORDS, self.text)
        return _OTHER_LOSS.sub(" ", self.text) if may_have else self.text


_DRAWN = re.compile(r"\n([^\n%]*)%(?:\|[^\n|]*\|)? *([0-9]+)/([0-9]+) \[")


class _Redrawn:
    """The drawings of a bar that say no more than the next one. A bar is drawn ten times per second.

    Of drawings one after the other, the first and the last one are read, and one for each twentieth part of the bar.
    """

    def __init__(self) -> None:
        self._next: re.Match[str] | None = None
        """the drawing after the line before"""
        self._read_step = -1

    def skips(self, text: str, begin: int, end: int) -> bool:
        """Whether not to read the line of the text between these line ends."""
        this, self._next = self._next, None
        is_first = this is None or this.start() != begin
        if is_first:
            this = _DRAWN.match(text, begin) if text.find("%", begin, end) > 0 else None
        if this is None:
            return False
        after = self._next = _DRAWN.match(text, end)
        step, length = int(this[2]), int(this[3])
        is_same_bar = after is not None and this[3] == after[3] and _words(this) == _words(after)
        if after is not None and is_same_bar and not is_first:
            steps_more = int(after[2]) - self._read_step
            if self._read_step <= step <= int(after[2]) and steps_more <= length / 20:
                return True
        self._read_step = step
        return False


def _words(drawing: re.Match[str]) -> str:
    """The description of a bar, without the percentage at its end."""
    return drawing[1].rstrip("0123456789")


class Reader:
    """Reads the logs of one attempt."""

    def __init__(
        self, trainers: Sequence[Trainer], processes: int, state: State | None = None
    ) -> None:
        """`processes`: how many there are, for trainers that print the speed of one. `state`: from the part before."""
        self.state = state or State()
        self.entries: list[dict[str, Any]] = []
        """the complete entries, as in metrics.jsonl without `attempt`; and those with `saved_step`: the step of a
        checkpoint that the trainer reported"""
        self.discarded = False
        """whether all entries before those were of something else"""
        self._trainers = {each.name: each for each in trainers}
        self._processes = processes
        self._plans: dict[str, Plans] = {}

    def read(self, piece: Piece) -> None:
        """Read a part of a log."""
        text = "\n" + piece.text.translate(_LINE_ENDS).removesuffix("\n") + "\n"
        pace = (piece.ended - piece.begun) / (len(text) - 1)
        if self.state.shown_at is None:
            self.state.shown_at = piece.begun
        bars = _Redrawn()
        at = 0  # the line end before the next line
        while at < len(text) - 1:
            candidate = self._plans_of(self.state.trainer).candidate
            if candidate is not None:
                found = candidate.search(text, at)
                if found is None:
                    break
                at = text.rfind("\n", at, found.start() + 1)
            end = text.index("\n", at + 1)
            has_loss = text.find("oss", at, end) > 0
            may_skip = self.state.trainer in ("", BARS) or not has_loss
            if not (may_skip and bars.skips(text, at, end)):
                self._read_line(text[at + 1 : end], piece.log, piece.begun + pace * end)
            at = end

    def newest(self, *, ended: bool) -> list[dict[str, Any]]:
        """The entries that later lines may change or remove: the newest step, with or without a loss.

        `ended`: the program prints nothing more, so a loss belongs to the newest step.
        """
        state = self.state
        found = [self._entry(state.newest)] if state.newest else []
        name = state.trainer or BARS
        seen = state.of.get(name)
        if seen is None or seen.step is None or not (state.trainer or BARS in self._trainers):
            return found
        values = _with_total({"step": seen.step}, seen)
        is_new = seen.step > (state.shown or 0)
        if not state.trainer and is_new:
            if seen.pace is not None:
                values["step_seconds"] = seen.pace
            found.append(self._entry(Entry(name, "", values, seen.time)))
        elif state.trainer:
            waiting = seen.waiting.get("loss")
            if ended and waiting is not None and seen.step > (state.step or 0):
                found.append(self._entry(Entry(name, "", {**values, "loss": waiting}, seen.time)))
            elif state.step is not None and seen.step > state.step and is_new:
                found.append(self._entry(Entry(name, "", values, seen.time)))
        return found

    @property
    def reported(self) -> str:
        """The trainer whose steps were found; empty: none."""
        bars = self.state.of.get(BARS)
        if not self.state.trainer and bars and bars.step:
            return BARS
        return self.state.reported

    def _plans_of(self, known: str) -> Plans:
        """The lines that matter if the trainer `known` was found."""
        plans = self._plans.get(known)
        if plans is None:
            strength = self._trainers[known].strength if known in self._trainers else -1
            trainers = self._trainers.values()
            active = [each for each in trainers if each.name == known or each.strength > strength]
            plans = self._plans[known] = Plans(active)
        return plans

    def _read_line(self, line: str, log: str, time: float) -> None:
        parts = _TEE.split(line)
        for part in parts:
            if part and len(part) < _LONGEST_LINE:
                self._read_part(part, log, time, tee=len(parts) > 1)

    def _read_part(self, text: str, log: str, time: float, *, tee: bool) -> None:
        """Find the values of one line."""
        if text[0] == " " and (blank := _CLEARED.fullmatch(text)):
            self.state.cleared = blank[1] is None
        text = _without_labels(text)
        line = _Text(text, log, time, tee)
        known = self._trainers.get(self.state.trainer)
        for trainer, lines in self._plans_of(self.state.trainer).of(text):
            if known and trainer is not known and trainer.strength <= known.strength:
                continue
            if trainer.detect and known is not trainer:
                if not usable(trainer.detect).search(text):
                    continue
                known = trainer
                self.state.trainer = trainer.name
            values = self._values(trainer, lines, line)
            if values is not None and self._take(trainer, values, line):
                return

    def _values(self, trainer: Trainer, lines: Sequence[Line], line: _Text) -> Values | None:
        """The values that the patterns of a trainer find; None if the line is not the trainer's."""
        seen = line.training if trainer.strength < 2 else line.text
        values: Values | None = None
        has_saved = False
        for pattern in lines:
            if not pattern.reads(seen):
                continue
            values = {} if values is None else values
            for key, before in pattern.fields:
                if key == "saved":
                    has_saved = has_saved or bool(usable(before).search(line.text))
                    continue
                found = number_after(seen, before)
                if key == "loss" and trainer.strength < 2:
                    found = number_after(seen, _WHOLE_LOSS) or found
                if found is None:
                    continue
                number, rest = found
                if key == "rate":
                    key = _unit(rest)
                if key:
                    values[key] = number
        if has_saved and values is not None:
            step = values.get("step")
            step = step if _is_step(step) else self._seen(trainer).step
            self.entries.append({"saved_step": step or 0, "time": round(line.time, 2)})
            return None
        return values

    def _seen(self, trainer: Trainer) -> Seen:
        return self.state.of.setdefault(trainer.name, Seen())

    def _take(self, trainer: Trainer, values: Values, line: _Text) -> bool:
        """Use the values of a line. Returns whether no other trainer needs to see the line."""
        state, seen = self.state, self._seen(trainer)
        _convert_speed(values)
        self._take_headings(trainer, values)
        if trainer.name == BARS and "step" not in values:
            return False
        is_of_epoch = "epoch_steps" in values and "step" in values
        if is_of_epoch and not self._count_epochs(trainer, values, line):
            return False
        if trainer.name == GENERIC and not _count_restarts(seen, values):
            return False
        step = values.get("step")
        if not _is_step(step):
            values.pop("step", None)
            return self._take_without_step(trainer, values, line)
        total = values.get("total")
        if total is not None:
            if not _is_step(total) or total < step:
                return False
            is_other_bar = state.step is not None and seen.total is not None and seen.total != total
            if "loss" not in values and is_other_bar:  # such as the bar of an evaluation
                return False
            seen.total = total
        drawn, state.cleared = state.cleared, False
        if drawn:
            seen.drawn = int(step)
        if not line.tee or seen.drawn is None or drawn:
            for key, value in seen.waiting.items():
                values.setdefault(key, value)
            seen.waiting.clear()
        seen.pace = values.get("step_seconds", seen.pace)
        return self._take_step(trainer, values, line)

    def _take_headings(self, trainer: Trainer, values: Values) -> None:
        """Note a step or an epoch that is on a line of its own, before the lines with its values."""
        state, seen = self.state, self._seen(trainer)
        if "heading" in values:
            state.heading = values["step"] = values.pop("heading")
        elif (
            "loss" in values
            and "step" not in values
            and trainer.name == BARS
            and state.heading is not None
        ):
            values["step"] = state.heading
            state.heading = None
        if "epoch_heading" in values:
            seen.epoch, seen.epochs = values["epoch_heading"], values.get("epochs")
            self._find_first_epoch(values["epoch_heading"])

    def _take_without_step(self, trainer: Trainer, values: Values, line: _Text) -> bool:
        """Use the values of a line without a step, which belong to a step before or after it.

        A progress bar has the step. Its next line is printed right after these values, unless stdout and stderr take
        different ways. torchrun looks for new lines of each every 0.1 s: the values may come before or after the bar
        that was drawn again for them. Without such bars, the last bar has the step, if no step takes less than 0.2 s.
        """
        state, seen = self.state, self._seen(trainer)
        step = None
        if line.tee and seen.drawn is not None:
            if seen.drawn > (state.step or 0):
                step = seen.drawn
        elif state.step is not None:
            is_slow = line.tee and seen.pace is not None and seen.pace >= 0.2
            if is_slow or _are_two_streams(seen.log, line.log):
                step = seen.step
        if "loss" in values and step is not None:
            values["step"] = step
            if seen.pace is not None:
                values["step_seconds"] = seen.pace
            return self._take_step(trainer, values, line)
        for key, value in values.items():
            if key in _OF_TRAINER:
                setattr(seen, key, value)
            else:
                seen.waiting[key] = value
        return False

    def _take_step(self, trainer: Trainer, values: Values, line: _Text) -> bool:
        """Use values that have a step. Returns whether no other trainer needs to see the line."""
        state, seen = self.state, self._seen(trainer)
        step = int(values["step"])
        seen.step, seen.log, seen.time = step, line.log, line.time
        if "loss" not in values and trainer.strength:
            self._note_sign(trainer, line)
            return state.trainer == trainer.name
        is_other = state.reported == BARS and trainer.name != BARS
        if is_other and (state.trainer == BARS or step < (state.shown or 0)):
            # what the bar counted may be something else
            state.step = state.newest = None
            self.entries.clear()
            self.discarded = True
        if state.newest and self._is_same(state.newest, trainer, step, line.log):
            # more about the same step; a progress bar first shows the loss of the step before
            values = {**state.newest.values, **values}
            state.newest = None
        elif self._is_known(step, line.log):
            return state.trainer == trainer.name
        state.step, state.step_log = step, line.log
        state.trainer = trainer.name
        self._keep(Entry(trainer.name, line.log, _with_total(values, seen), line.time))
        return True

    def _is_known(self, step: int, log: str) -> bool:
        """Whether this is a step from the log of another rank. A much smaller step begins a new training."""
        newest = self.state.step
        if newest is None or step > newest:
            return False
        return step * 2 >= newest or self.state.step_log != log

    def _is_same(self, entry: Entry, trainer: Trainer, step: int, log: str) -> bool:
        """Whether an entry is of this step, from the same log or only a sign of progress."""
        is_sign = trainer.strength > 0 and "loss" not in entry.values
        return (
            entry.values["step"] == step
            and entry.trainer == trainer.name
            and (entry.log == log or is_sign)
        )

    def _note_sign(self, trainer: Trainer, line: _Text) -> None:
        """Keep a step without a loss as a sign of progress, if none was kept for a while."""
        state, seen = self.state, self._seen(trainer)
        known = state.trainer or BARS
        if known != trainer.name or seen.step is None:
            return
        if line.time - (state.shown_at or 0.0) < SIGN_SECONDS or seen.step <= (state.shown or 0):
            return
        if state.trainer and (state.step is None or seen.step <= state.step):
            return
        values = _with_total({"step": seen.step}, seen)
        if not state.trainer and seen.pace is not None:
            values["step_seconds"] = seen.pace
        self._keep(Entry(trainer.name, line.log, values, line.time))

    def _keep(self, entry: Entry) -> None:
        state = self.state
        if state.newest:
            self.entries.append(self._entry(state.newest))
        state.newest = entry
        state.reported = entry.trainer
        state.shown, state.shown_at = int(entry.values["step"]), entry.time

    def _entry(self, entry: Entry) -> dict[str, Any]:
        """The entry, as in metrics.jsonl without `attempt`."""
        seen = self.state.of[entry.trainer]
        values = entry.values
        record: dict[str, Any] = {"step": values["step"]}
        total = values.get("total")
        if total is not None and total >= values["step"]:
            record["total_steps"] = total
        record["loss"] = values.get("loss")
        record |= {key: value for key, value in values.items() if key not in _NOT_KEPT}
        if "tokens_per_second" not in record and (speed := self._tokens_per_second(seen, values)):
            record["tokens_per_second"] = speed
        return {**record, "time": round(entry.time, 2)}

    def _tokens_per_second(self, seen: Seen, values: Values) -> Number | None:
        """The speed of all processes, if it follows from other values."""
        batch = values.get("batch_size", seen.batch_size) or 0
        seconds = values.get("step_seconds", 0)
        tokens = values.get("tokens", batch * (seen.sequence_length or 0))
        if tokens > 0 and seconds > 0:
            return round(tokens / seconds, 1)
        return (values.get("tokens_per_second_per_process") or 0) * self._processes or None

    def _find_first_epoch(self, epoch: Number) -> None:
        if self.state.first_epoch is None or epoch == 0:
            self.state.first_epoch = int(epoch > 0)

    def _count_epochs(self, trainer: Trainer, values: Values, line: _Text) -> bool:
        """The step of an epoch becomes a step of the training. Returns False if the line must not count."""
        step, length = values["step"], values["epoch_steps"]
        if trainer.name != BARS:
            values["step"] = step + (values.get("epoch", 0) - trainer.first_epoch) * length
        elif not (_is_step(step) and _is_step(length)) or length < 1 or step > length:
            return False
        elif "epoch_from_0" in values or "epoch" in values:
            self._count_known_epochs(values, line)
        elif not self._follow_bar(values, line):
            return False
        values["step"] = _whole(values["step"])
        if "epochs" in values:
            values["total"] = values.pop("epochs") * length
        del values["epoch_steps"]
        return True

    def _count_known_epochs(self, values: Values, line: _Text) -> None:
        """Count the steps of an epoch whose number is on the line."""
        state, step, length = self.state, values["step"], values["epoch_steps"]
        if "epoch_from_0" in values:
            values["epoch"] = values.pop("epoch_from_0")
            state.first_epoch = 0
        else:
            self._find_first_epoch(values["epoch"])
        epoch, first = values["epoch"], state.first_epoch or 0
        # the steps of some programs go on over the epochs; a resumed one of them is known by its large first step
        if state.epoch is not None:
            if epoch > state.epoch:
                state.steps_go_on = step > state.epoch_step
        elif epoch > first and step > length / 4 and _STEP_OR_ITERATION.search(line.text):
            state.steps_go_on = True
        state.epoch, state.epoch_step = epoch, step
        if state.steps_go_on:
            values["total"] = length
            values.pop("epochs", None)
        else:
            values["step"] = step + (epoch - first) * length

    def _follow_bar(self, values: Values, line: _Text) -> bool:
        """Count the steps of a bar without an epoch. Returns False if it is the bar of something else."""
        state, bar = self.state, self.state.bar
        step, length = int(values["step"]), int(values["epoch_steps"])
        pace = values.get("step_seconds", 0.0)
        seconds = _elapsed(line.text)
        if bar.steps != length or bar.log != line.log:
            is_complete = bar.steps is not None and bar.step >= 0.9 * bar.steps
            if step == 0:
                bar.successor = length if is_complete else None
            # without a description and a loss: if a step takes 0.02 s or more, and the bar 10 s, which is not certain
            # at its start
            is_slow = pace >= 0.02 and length * pace >= 10 and seconds >= 5
            if "undescribed" in values and "loss" not in values and not is_slow:
                return False
            if bar.steps is not None and not self._replaces_bar(values, length, seconds):
                return False
            if state.trainer in ("", BARS):
                state.step = state.shown = None
            bar.before, bar.epoch_seconds = 0, 0.0
        elif bar.step - step >= length / 2:
            bar.before += length
            bar.epoch_seconds = bar.seconds
        elif step - bar.step > length / 2 and 0 < 0.8 * bar.epoch_seconds <= seconds:
            return False  # a slower rank, which has not begun the epoch
        bar.steps, bar.log, bar.step, bar.seconds, bar.pace = length, line.log, step, seconds, pace
        values.pop("undescribed", None)
        seen = state.of[BARS]
        if seen.epoch is not None:
            values["epoch"] = seen.epoch
            if seen.epochs is not None:
                values["epochs"] = seen.epochs
            values["step"] = step + (seen.epoch - (state.first_epoch or 0)) * length
        elif bar.before:
            values["step"] = step + bar.before
        else:
            values["total"] = length
        return True

    def _replaces_bar(self, values: Values, length: int, seconds: float) -> bool:
        """Whether a bar, drawn `seconds` after its start, is the one of the training, and the bar before was not.

        Only this one has a loss, or it takes longer and began after the other: it is not a bar of the epochs around it.
        """
        bar, is_bars = self.state.bar, self.state.trainer == BARS
        if "loss" in values and not is_bars:
            return True
        steps = bar.steps or 0
        if length == steps or ("loss" not in values and is_bars):
            return False
        began_after = seconds < bar.seconds or length == bar.successor
        takes_longer = length * values.get("step_seconds", 0) > steps * bar.pace
        return bar.step >= 0.9 * steps and began_after and takes_longer


def _without_labels(text: str) -> str:
    """The text of a line without colours, and without what launchers write before it."""
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    if text[:1] in " ([0123456789":
        for label in _LABELS:
            if found := label.match(text):
                text = text[found.end() :]
    # Keras on a terminal goes back to draw its bar again
    return text.rpartition("\b")[2]


def _count_restarts(seen: Seen, values: Values) -> bool:
    """Add the steps of the epochs before, if the step count restarts at each epoch.

    Without the steps per epoch, an epoch ends an interval after its last line. Returns False for a line of a slower
    rank, which has not begun the epoch.
    """
    epoch, step = values.get("epoch"), values.get("step")
    if epoch is None or not _is_step(step):
        return True
    if seen.epoch is None or epoch < seen.epoch:
        if seen.epoch is not None and 0 < seen.length <= 2 * step:
            return False
        seen.before = seen.interval = seen.length = 0
    elif epoch == seen.epoch:
        seen.interval = step - seen.epoch_step if step > seen.epoch_step else seen.interval
    elif step <= seen.epoch_step:
        seen.length = int(values.get("total") or seen.epoch_step + (seen.interval or step) - step)
        seen.before += seen.length
        seen.total = None
    is_same = epoch == seen.epoch
    seen.epoch, seen.epoch_step = epoch, max(step, seen.epoch_step) if is_same else step
    if seen.before:
        values["step"] = step + seen.before
        values.pop("total", None)
    return True


def _with_total(values: Values, seen: Seen) -> Values:
    return values if seen.total is None else {**values, "total": seen.total}


def _unit(rest: str) -> str:
    """The key of a speed with this text after it, such as `s/it`; empty if its unit is not a step."""
    return next((key for unit, key in _UNITS if unit.match(rest)), "")


def _convert_speed(values: Values) -> None:
    """Milliseconds per step, and steps per second, become seconds per step."""
    if "step_milliseconds" in values:
        values["step_seconds"] = _tidy(values.pop("step_milliseconds") / 1000)
    per_second = values.pop("steps_per_second", 0)
    if per_second > 0:
        values["step_seconds"] = _tidy(1 / per_second)


def _tidy(value: float) -> float:
    """The value without the digits that only the conversion has added."""
    return float(f"{value:.8g}")


def _is_step(value: Number | None) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < _LARGEST_STEP


def _whole(value: Number) -> Number:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _elapsed(text: str) -> float:
    """The seconds in `[01:30<` of tqdm; 0 without it."""
    found = _ELAPSED.search(text)
    seconds = 0
    for part in found[1].split(":") if found else ():
        seconds = seconds * 60 + int(part or 0)
    return seconds


def _are_two_streams(one: str, other: str) -> bool:
    """Whether these are the files of stdout and of stderr, and not those of two ranks."""
    return one != other and "/" not in one and "/" not in other
