"""Texts that have broken other tools on their way through shells, TOML files and argument lists."""

from hypothesis import strategies as st

CORPUS = (
    "",
    "'",
    '"',
    "$HOME",
    "${HOME}",
    "$${HOME}",
    "$(id)",
    "`id`",
    "a\nb\n",
    "# not a comment",
    "%j %x",
    "back\\slash\\",
    "-leading",
    "--",
    "emoji 🦙 é",
    " blanks  at both ends ",
    "tab\tand\x01control\x7f",
    "carriage\r\nreturn\r",
    "\r\n",
    "a=b;c&d|e<f>g*h?i[j]{k}~!",
    "${", "${}", "${-x}", "}", "${A:-b}", "$", "$$",
    "x" * 100_000,
)  # fmt: skip

# every text that a variable can hold: no NUL, and nothing that UTF-8 cannot say
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=40)
