"""What others have written cannot drive the user's terminal, and tables fit it."""

import json

import pytest

from runner.commands.console import Console, LogFilter, visible
from runner.errors import RunnerError

TITLE, CLIPBOARD, C1, BIDI = "\x1b]0;mine\x07", "\x1b]52;c;bWluZQ==\x07", "\x9b2J", "\u202egpj.exe\u2066"


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_control_characters_are_shown_and_text_is_left_alone() -> None:
    assert visible(TITLE + C1) == r"\x1b]0;mine\x07\x9b2J" and visible("\u202e") == r"\u202e"
    assert visible("é 日本 …\n\tb") == "é 日本 …\n\tb"


def test_no_line_table_or_error_passes_them(capsys: pytest.CaptureFixture[str]) -> None:
    console, bad = Console(), TITLE + CLIPBOARD + C1 + BIDI
    console.say(bad)
    console.warn(bad)
    console.error(RunnerError(bad, bad, bad))
    console.table(("A", "REASON"), [("x", bad)])
    console.line(bad)
    console.answer_json([{"a": bad}])
    printed = capsys.readouterr()
    for text in printed:
        assert not {*text} & {"\x1b", "\x07", "\x9b", "\u202e", "\u2066"}
    assert json.loads(printed.out[printed.out.index("[\n") :]) == [{"schema": 1, "a": bad}]


def test_an_answer_to_a_program_is_exact_and_one_to_a_terminal_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Console().answer("/a/\x1b[31mb")
    assert capsys.readouterr().out == "/a/\x1b[31mb\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    Console().answer("/a/\x1b[31mb")
    assert capsys.readouterr().out == "/a/\\x1b[31mb\n"


def test_of_a_log_colours_stay_and_nothing_else() -> None:
    log = f"\x1b[1;31mred\x1b[0m {TITLE}{C1}{BIDI} 10%\r20%\té\n".encode() + b"\xff\n"
    whole = LogFilter()(log)
    assert whole == (b"\x1b[1;31mred\x1b[0m \\x1b]0;mine\\x07\\x9b2J\\u202egpj.exe\\u2066 10%\r20%\t\xc3\xa9\n\xff\n")
    bits = LogFilter()  # and wherever the file is cut
    assert b"".join(bits(bytes((byte,))) for byte in log) == whole


def test_a_table_fits_the_terminal_and_wide_shows_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [("sft-0001", "FAILED", "reason " * 20, "nid[001-002]"), ("x", "RUNNING", "", "y")]
    header = ("RUN", "STATE", "REASON", "NODES")
    Console().table(header, rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 60 and "nid[001-002]" in lines[1] and "sft-0001" in lines[1] and "…" in lines[1]
    Console(wide=True).table(header, rows)
    assert ("reason " * 20).strip() in capsys.readouterr().out
    Console().table(header[:3], [row[:3] for row in rows], wrap=True)
    wrapped = capsys.readouterr().out
    assert max(map(len, wrapped.splitlines())) <= 60 and wrapped.count("reason") == 20


def test_states_are_coloured_where_colours_are_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    table = (("RUN", "STATE"), [("FAILED", "FAILED"), ("b", "RUNNING")])
    Console().table(*table)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["FAILED  \x1b[31mFAILED\x1b[0m", "b       \x1b[36mRUNNING\x1b[0m"]
    monkeypatch.setenv("NO_COLOR", "1")
    Console().table(*table)
    assert "\x1b" not in capsys.readouterr().out


def test_a_passing_line_gives_way_to_the_next_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    console = Console()
    for line in ("one\x1b", "two", ""):
        console.passing(line)
    console.passing("three")
    console.say("done")
    assert capsys.readouterr().err == "  one\r\x1b[2K  two\r\x1b[2K  three\r\x1b[2Kdone\n"
