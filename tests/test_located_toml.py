"""Every key of a TOML file knows its line, and every complaint about one names it."""

from pathlib import Path

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.located_toml import Place, parse_toml, read_toml, refuse_unknown_keys, string_table, strings, typed

TEXT = '''# a comment = not a key
image = "a#b" # "
mounts = [
  "/a:/a", # one
  # none here
  "/b:/b",
  """
two lines ]""", '/c',
]
"quoted key".'and another' = {value = 1, inner = { deep = [ { x = 1 }, { x = 2 } ] } }

[env]
A = "1"
"B.C" = """
x = y
[not.a.table]
"""
D = 2024-01-01T00:00:00Z

[annotations]
com.hooks.cxi.enabled = "true"
com.hooks.cxi.other = 'a\\'

[[base]]
image = "one"
[base.sub]
z = 1
[[base]]
image = "two"
'''


def document(text: str = TEXT):
    return parse_toml(text, Path("x.toml"))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (("image",), 2),
        (("mounts",), 3),
        (("mounts", "0"), 4),
        (("mounts", "1"), 6),
        (("mounts", "2"), 7),
        (("mounts", "3"), 8),
        (("quoted key", "and another"), 10),
        (("quoted key", "and another", "value"), 10),
        (("quoted key", "and another", "inner", "deep", "1", "x"), 10),
        (("env",), 12),
        (("env", "A"), 13),
        (("env", "B.C"), 14),
        (("env", "D"), 18),
        (("annotations", "com", "hooks", "cxi", "enabled"), 21),
        (("annotations", "com", "hooks", "cxi", "other"), 22),
        (("base", "0", "image"), 25),
        (("base", "0", "sub", "z"), 27),
        (("base", "1"), 28),
        (("base", "1", "image"), 29),
    ],
)
def test_each_key_has_its_line(keys, line):
    assert document().place(*keys) == Place(Path("x.toml"), line)


def test_an_absent_key_has_the_place_of_the_table_around_it():
    assert document().place("env", "NOPE").line == 12
    assert document().place("nope") == Place(Path("x.toml"))


def test_windows_line_ends_count_as_one_line():
    assert document("a = 1\r\n\r\nb = 2\r\n").place("b").line == 3


_words = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=6)
_values = st.recursive(
    st.one_of(st.booleans(), st.integers(-9, 9), _words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_words, inner, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(_words, _values, max_size=5))
def test_every_key_of_any_document_is_found(data):
    text = tomlkit.dumps(data)
    located = document(text)

    def check(value, keys):
        if keys:
            assert keys in located.lines, (keys, text)
        if isinstance(value, dict):
            for key, inner in value.items():
                check(inner, (*keys, key))
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                check(inner, (*keys, str(index)))

    check(located.data, ())


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("a = 1\nb = yes\n", 2, "quotes"),
        ("[t]\na.b = 1\n\n[t.a]\nc = 1\n", 4, "only once"),
        ("[t]\n[t]\n", 2, "only once"),
        ("a = 1\na = 2\n", 2, "a key is set twice"),
    ],
)
def test_a_syntax_error_names_its_line_and_a_way_out(text, line, word):
    with pytest.raises(RunnerError) as caught:
        document(text)
    assert f"x.toml:{line} is not valid TOML" in caught.value.what
    assert f"line {line}, column" in caught.value.why
    assert word in caught.value.fix


def test_an_unclosed_string_is_an_error_too():
    with pytest.raises(RunnerError, match="is not valid TOML"):
        document('a = """never closed')


def test_a_missing_file_and_one_that_is_not_text_are_named(tmp_path):
    with pytest.raises(RunnerError, match="No such file"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'a = 1\nb = "\xe9"\n')
    with pytest.raises(RunnerError) as caught:
        read_toml(tmp_path / "latin.toml")
    assert "latin.toml:2" in caught.value.what and "UTF-8" in caught.value.why


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "mark.toml").write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert read_toml(tmp_path / "mark.toml").place("a").line == 1


def test_an_unknown_key_is_refused_with_line_and_near_miss():
    with pytest.raises(RunnerError) as caught:
        refuse_unknown_keys(document('image = "x"\nmount = []\n'), (), ("image", "mounts"), "EDF")
    assert str(caught.value).splitlines() == [
        "runner: x.toml:2: unknown key 'mount'",
        "  because: the keys of this EDF: image, mounts",
        "  try:     did you mean 'mounts'?",
    ]
    with pytest.raises(RunnerError) as caught:
        refuse_unknown_keys(document("[restart]\nhnag = 1\n"), ("restart",), ("hang",), "job")
    assert "unknown key 'hnag' in [restart]" in caught.value.what and caught.value.why == "the keys of [restart]: hang"
    refuse_unknown_keys(document("[env]\nA = 1\n"), ("env",), ("A",), "EDF")
    refuse_unknown_keys(document(""), ("env",), (), "EDF")


def test_a_value_of_another_type_is_refused_with_line_key_and_expectation():
    text = 'n = true\ns = 3\nl = ["a",\n 5]\n[t]\nA = "x"\nB = 1\nC = false\n'
    located = document(text)
    for call, words in (
        (lambda: typed(located, ("n",), int), ("x.toml:1", "n must be a whole number", "True")),
        (lambda: typed(located, ("s",), str), ("x.toml:2", "s must be text", 'write "3"')),
        (lambda: strings(located, ("l",)), ("x.toml:4", "every element of l", 'write "5"')),
        (lambda: string_table(located, ("t",)), ("x.toml:7", "t.B must be text", 'write "1"')),
    ):
        with pytest.raises(RunnerError) as caught:
            call()
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_typed_values_and_defaults():
    located = document('a = 1\nf = 2\nl = ["x"]\n[t]\nk = "v"\n')
    assert typed(located, ("a",), int, 5) == 1
    assert typed(located, ("f",), float) == 2.0
    assert typed(located, ("none",), str) is None
    assert typed(located, ("none",), str, "d") == "d"
    assert strings(located, ("l",)) == ("x",)
    assert strings(located, ("m",)) == ()
    assert string_table(located, ("t",)) == {"k": "v"}
    assert string_table(located, ("u",)) == {}
