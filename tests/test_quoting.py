"""Whatever text a user writes, bash, sh and sbatch read it back unchanged, or it is refused; it never runs."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import quoting
from runner.errors import RunnerError
from tests.runs.scripts import CORPUS

ANY_TEXT = st.text(max_size=200)
NASTY = st.text(alphabet="'\"$`\\(){}[]#%j -!&|;<>*?~\n\r\t=,:^é😀\x01\x7f", max_size=60)
MANY = settings(max_examples=300)


def bash_words(line: str) -> list[bytes]:
    """The words that bash makes of a line, as bytes."""
    program = f"printf '%s\\0' {line}".encode("utf-8", "surrogateescape")
    done = subprocess.run(("/bin/bash", "-u"), input=program, capture_output=True, check=True, env={"PATH": "/nothing"})
    return done.stdout.split(b"\0")[:-1]


@pytest.mark.parametrize("text", CORPUS)
def test_corpus_survives_bash(text: str) -> None:
    """Each text of the corpus is one word for bash, on one line of the script."""
    quoted = quoting.literal(text)
    assert "\n" not in quoted
    assert bash_words(quoted) == [text.encode()]


@MANY
@given(st.lists(ANY_TEXT | NASTY, max_size=8))
def test_any_text_survives_bash(words: list[str]) -> None:
    """Words are words: none is split, joined, expanded or run."""
    try:
        line = " ".join(quoting.literal(word) for word in words)
    except RunnerError:
        assert any("\0" in word for word in words)
        return
    assert bash_words("first " + line) == [b"first", *(word.encode() for word in words)]


def test_bytes_that_are_no_text_survive() -> None:
    """A file name in another encoding reaches the program byte by byte."""
    name = b"caf\xe9\x80".decode("utf-8", "surrogateescape")
    assert bash_words(quoting.literal(name)) == [b"caf\xe9\x80"]


@pytest.mark.parametrize("word", ["a\0b", "\ud800", "x" * 131_072], ids=["NUL", "half a pair", "too long"])
def test_what_no_word_can_hold_is_refused(word: str) -> None:
    """The error says what the word is, and how else to pass it."""
    with pytest.raises(RunnerError) as caught:
        quoting.literal(word, "argument 3")
    assert caught.value.what.startswith("argument 3")
    assert caught.value.fix


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("--environment=${RUNNER_RUN}/environment.toml", '"--environment=${RUNNER_RUN}/environment.toml"'),
        ("$${HOME}", "'${HOME}'"),
        ('${A}$(id)`id`$B"\\', '"${A}\\$(id)\\`id\\`\\$B\\"\\\\"'),
        ("plain", "plain"),
        ("it's", "'it'\\''s'"),
        ("$", "'$'"),
    ],
)
def test_only_braced_names_are_live(word: str, quoted: str) -> None:
    """In an engine's words `${NAME}` is for bash, and nothing else is."""
    assert quoting.live(word) == quoted


@MANY
@given(NASTY.filter(lambda text: "${" not in text), NASTY.filter(lambda text: "${" not in text))
def test_text_around_a_live_name_survives(before: str, after: str) -> None:
    """What stands beside a variable is literal, whatever it is; the variable's value is not read again."""
    if before.endswith("$"):
        before += "."  # `$${NAME}` is the literal text
    try:
        quoted = quoting.live(f"{before}${{V}}{after}")
    except RunnerError:
        assert not (before + after).isprintable()
        return
    value = "$(id) '\" `x`"
    done = subprocess.run(
        ("/bin/bash", "-u", "-c", f"printf %s {quoted}"), capture_output=True, check=True, env={"V": value}
    )
    assert done.stdout.decode() == before + value + after


def test_defaults_in_flags_are_refused() -> None:
    """`${NAME:-x}` never reaches a script: an engine decides it before."""
    with pytest.raises(RunnerError, match="variable with a default"):
        quoting.live("${HOME:-x}")


@pytest.mark.parametrize("word", ["--comment=a\nb", "--nodes=$N", "--comment=${X}", "--comment=\t", "--comment=a\0b"])
def test_directives_are_one_line_without_variables(word: str) -> None:
    """No shell reads an #SBATCH line, and a line break would begin another line."""
    with pytest.raises(RunnerError):
        quoting.directive(word, "the flag")


def test_hash_in_a_directive_is_escaped() -> None:
    """pyxis' REGISTRY#IMAGE would lose its image: sbatch begins a comment at `#`."""
    word = "--container-image=nvcr.io#nvidia/pytorch:24.06-py3"
    assert quoting.directive(word, "x") == "--container-image=nvcr.io\\#nvidia/pytorch:24.06-py3"
