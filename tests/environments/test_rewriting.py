"""A change to an EDF touches the lines that it is about, and no other."""

import difflib
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.environments.rewriting import APPEND, Rename, Set, Unset, rewrite
from runner.errors import RunnerError
from tests.environments.corpus import CORPUS, texts

TEXT = """\
# what this file is for
image = "a" # why this one

# what is mounted
mounts = [
  "/a:/a", # one
  # none here
  "/b:/b",
]

# about variables
[env]
# the first
A = '1'
B = "2"   # aligned

# hooks
[annotations]
com.hooks.cxi.enabled = "true"
com.hooks.aws.enabled = "true"  # x

[annotations.com.sarus]
z = "1"
# the last word
"""


def changed(*changes, text=TEXT):
    """The lines that go (-) and come (+)."""
    lines = difflib.ndiff(text.splitlines(), rewrite(text, changes).splitlines())
    return [line for line in lines if line[0] in "+-"]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (Set(("image",), "b"), ['- image = "a" # why this one', '+ image = "b" # why this one']),
        (Set(("writable",), True), ["+ writable = true"]),
        (Set(("mounts", "0"), "/n:/n"), ['-   "/a:/a", # one', '+   "/n:/n", # one']),
        (Set(("mounts", APPEND), "/n:/n"), ['+   "/n:/n",']),
        (Set(("devices", APPEND), "gpu"), ['+ devices = ["gpu"]']),
        (Set(("env", "B"), "3"), ['- B = "2"   # aligned', '+ B = "3"   # aligned']),
        (Set(("env", "C"), "3"), ['+ C = "3"']),
        (Set(("env", "a b"), "3"), ['+ "a b" = "3"']),
        (
            Set(("annotations", "com", "hooks", "cxi", "enabled"), "false"),
            ['- com.hooks.cxi.enabled = "true"', '+ com.hooks.cxi.enabled = "false"'],
        ),
        (Set(("annotations", "com", "hooks", "aws", "variant"), "v"), ['+ com.hooks.aws.variant = "v"']),
        (Set(("annotations", "com", "sarus", "y"), "v"), ['+ y = "v"']),
        (Unset(("image",)), ['- image = "a" # why this one']),
        (Unset(("mounts", "1")), ['-   "/b:/b",']),
        (Unset(("env", "A")), ["- A = '1'"]),
        (Unset(("annotations", "com", "hooks", "aws", "enabled")), ['- com.hooks.aws.enabled = "true"  # x']),
        (Unset(("annotations", "com", "sarus")), ["- [annotations.com.sarus]", '- z = "1"', "- # the last word"]),
        (Unset(("nothing", "here")), []),
        (Rename(("mounts",), "devices"), ["- mounts = [", "+ devices = ["]),
        (Rename(("env", "A"), "a b"), ["- A = '1'", "+ \"a b\" = '1'"]),
        (Rename(("env",), "annotation"), ["- [env]", "+ [annotation]"]),
        (Rename(("nothing",), "x"), []),
    ],
)
def test_a_change_touches_its_own_lines_only(change, difference):
    assert changed(change) == difference


def test_a_new_key_stands_before_the_comment_of_the_next_table():
    lines = rewrite(TEXT, [Set(("workdir",), "/w"), Set(("env", "C"), "3")]).splitlines()
    assert lines.index('workdir = "/w"') < lines.index("# about variables") == lines.index("[env]") - 1
    assert lines.index('C = "3"') < lines.index("# hooks") == lines.index("[annotations]") - 1


def test_tables_that_are_not_there_are_made():
    assert rewrite("", [Set(("env", "A"), "1")]) == '[env]\nA = "1"\n'
    text = rewrite(
        'image = "x"', [Set(("env", "A"), "1"), Set(("annotations", "com", "a"), "1"), Set(("env", "B"), "")]
    )
    assert text == 'image = "x"\n\n[env]\nA = "1"\nB = ""\n\n[annotations]\ncom.a = "1"\n'
    assert rewrite("[env]\nA = '1'\n", [Set(("image",), "x")]) == "image = \"x\"\n[env]\nA = '1'\n"


def test_a_key_that_belongs_above_is_moved():
    text = "[env]\nA = '1' # a\nworkdir = '/w'\n"
    changes = (Unset(("env", "workdir")), Set(("workdir",), "/w"))
    assert rewrite(text, changes) == "workdir = \"/w\"\n[env]\nA = '1' # a\n"


def test_tables_in_any_form_take_changes():
    for text in (
        'env = { A = "1", B = "2" }\n',
        'env.A = "1"\nenv.B = "2"\n',
        '[env]\nA = "1"\n[annotations.x]\nb = "1"\n[env.deep]\n[annotations]\nc = "1"\n',
        '[annotations.com.hooks.ssh]\nenabled = "true"\n',
    ):
        before = tomllib.loads(text)
        new = tomllib.loads(rewrite(text, [Set(("env", "A"), "9"), Set(("env", "N"), "8")]))
        assert (new["env"]["A"], new["env"]["N"]) == ("9", "8")
        assert {k: v for k, v in new.items() if k != "env"} == {k: v for k, v in before.items() if k != "env"}
        added = tomllib.loads(rewrite(text, [Set(("annotations", "com", "hooks", "cxi", "enabled"), "true")]))
        assert added["annotations"]["com"]["hooks"]["cxi"] == {"enabled": "true"}


def test_windows_line_ends_stay():
    assert rewrite("a = '1' # x\r\nb = '2'\r\n", [Set(("a",), "3")]) == "a = \"3\" # x\r\nb = '2'\r\n"


def test_what_is_not_toml_is_refused_with_its_line():
    with pytest.raises(RunnerError, match=r"EDF:2 is not valid TOML"):
        rewrite("a = '1'\nb =\n", [Set(("a",), "3")])


def test_a_change_that_does_not_fit_is_refused():
    with pytest.raises(RunnerError, match=r"cannot change image\.x"):
        rewrite(TEXT, [Set(("image", "x"), "1")])


@pytest.mark.parametrize("word", CORPUS)
def test_any_text_can_be_written(word):
    for keys in (("image",), ("env", "A"), ("env", "NEW"), ("mounts", "0"), ("mounts", APPEND)):
        data = tomllib.loads(rewrite(TEXT, [Set(keys, word)]))
        value = data
        for key in keys:
            value = value[-1 if key == APPEND else int(key) if isinstance(value, list) else key]
        assert value == word


_paths = st.sampled_from(
    [
        *(("image",), ("workdir",), ("env", "A"), ("env", "C"), ("annotations", "top")),
        *(("annotations", "com", "hooks", name, "enabled") for name in ("cxi", "aws", "new")),
        ("annotations", "com", "sarus", "z"),
    ]
)


@given(st.lists(st.one_of(st.builds(Set, _paths, texts), st.builds(Unset, _paths)), max_size=4))
def test_comments_outlive_any_changes(changes):
    text = rewrite(TEXT, changes)
    for comment in ("# what this file is for", "# what is mounted", "  # none here", "# hooks", "# the last word"):
        assert comment in text.splitlines()
