"""An EDF file is read completely or refused with the line, the reason and the way out."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.environments.edf import Mount, parse_mount
from runner.environments.engines import attach
from runner.environments.environment import Environment, default_environment, emit_edf, load_environment
from runner.errors import RunnerError
from runner.expansion import expand, literal, sarus_text
from runner.project import Project
from runner.site_files import load_site
from tests.environments.corpus import CORPUS, texts
from tests.environments.inside import environment_of

COMPLETE = """\
image = "nvcr.io#nvidia/pytorch:24.06-py3"
workdir = "/srv"
entrypoint = true
writable = false
mounts = [
  "/capstor",                     # a source alone is its own target
  "${SCRATCH}/data:/data:ro+private",
  "${SCRATCH}/x.sqsh:/x:sqsh",
]
devices = ["nvidia.com/gpu=all"]

[env]
EMPTY = ""
A = "it's"

[annotations]
com.hooks.cxi.enabled = "false"
[annotations.com.sarus]
nested = "yes"
"""


def bare(environment: Environment) -> Environment:
    """The environment without what depends on where it was written."""
    return replace(environment, name="", path=None, origins={})


def test_each_value_is_text_by_the_name_of_its_origin(tmp_path):
    environment = environment_of(tmp_path, COMPLETE.replace('=all"', '=0", "nvidia.com/gpu=1"'))
    values = environment.values()
    assert values.keys() == environment.origins.keys()
    assert (values["writable"], values["mounts.0"]) == ("false", "/capstor:/capstor")
    assert (values["devices.1"], values["annotations.com.sarus.nested"]) == ("nvidia.com/gpu=1", "yes")


def test_all_keys_are_read_with_their_origins(tmp_path):
    environment = environment_of(tmp_path, COMPLETE)
    assert bare(environment) == Environment(
        name="",
        path=None,
        image="nvcr.io#nvidia/pytorch:24.06-py3",
        workdir="/srv",
        entrypoint=True,
        writable=False,
        mounts=(
            Mount("/capstor", "/capstor"),
            Mount("${SCRATCH}/data", "/data", ("ro", "private")),
            Mount("${SCRATCH}/x.sqsh", "/x", ("sqsh",)),
        ),
        env={"EMPTY": "", "A": "it's"},
        annotations={"com.hooks.cxi.enabled": "false", "com.sarus.nested": "yes"},
        devices=("nvidia.com/gpu=all",),
    )
    lines = {key: origin.place.line for key, origin in environment.origins.items() if origin.place}
    assert lines["mounts.1"] == 7 and lines["env.A"] == 14 and lines["annotations.com.sarus.nested"] == 19


def test_unset_keys_mean_the_same_on_every_engine(tmp_path):
    environment = environment_of(tmp_path, 'image = "x"\n')
    assert (environment.entrypoint, environment.writable, environment.workdir) == (False, True, None)
    assert str(environment.origins["writable"]) == "default"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('mount = ["/a:/b"]\n', ("it.toml:1", "unknown key 'mount'", "did you mean 'mounts'?")),
        ('image = "x"\n[env]\nA = 1\n', ("it.toml:3", "env.A must be text", 'write "1"')),
        ("[annotations]\na.b = true\n", ("it.toml:2", "annotations.a.b must be text", 'write "true"')),
        ('mounts = [\n"/a:/b",\n"/data:"]\n', ("it.toml:3", "cannot read the mount '/data:'", "without empty fields")),
        ('mounts = ["/a:/b:/c:ro"]\n', ("it.toml:1", "SOURCE[:TARGET[:FLAG+FLAG]]")),
        ('mounts = ["~/data:/data"]\n', ("it.toml:1", "${HOME}/data")),
        ('mounts = ["$SCRATCH/a:/a"]\n', ("it.toml:1", "${SCRATCH}")),
        ('mounts = ["data:/data"]\n', ("it.toml:1", "./data")),
        ('mounts = ["/a:b"]\n', ("it.toml:1", "the target 'b' must begin with", "/b")),
        ('mounts = ["/a:/b:ro++rw"]\n', ("it.toml:1", "one of its flags is empty")),
        ('mounts = "/a:/b"\n', ("it.toml:1", "mounts must be an array")),
        ('workdir = "${HOME"\n', ("it.toml:1", "workdir", "close the brace")),
        ('[env]\nA = "${B-x}"\n', ("it.toml:2", "env.A", "${NAME:-default}")),
        ('[env]\nA = "a\\u0000b"\n', ("it.toml:2", "NUL byte")),
        ('[env]\n"A B" = "x"\n', ("it.toml:2", "is not a variable name")),
        ("entrypoint = 'yes'\n", ("it.toml:1", "entrypoint must be true or false")),
        ("[annotations]\na.b.c = '1'\n[annotations.a.b]\nd = '2'\n", ("it.toml:3", "only once")),
        ('[annotations]\n"a.b" = "1"\na.b = "2"\n', ("it.toml:3", "a.b is set twice", "it.toml:2")),
        (
            "base_environment = 'nope'\n",
            ("it.toml:1: there is no environment 'nope'", "no environment is available here"),
        ),
    ],
)
def test_bad_input_is_refused_with_line_reason_and_way_out(tmp_path, text, words):
    with pytest.raises(RunnerError) as caught:
        environment_of(tmp_path, text)
    assert [word for word in words if word not in str(caught.value)] == []


def project_with(tmp_path: Path, **files: str) -> Project:
    (tmp_path / "edf").mkdir(exist_ok=True)
    for name, text in files.items():
        (tmp_path / "edf" / f"{name}.toml").write_text(text)
    return Project(tmp_path, tmp_path / "shipped", tmp_path)


def test_bases_are_merged_in_order_and_the_file_itself_wins(tmp_path):
    project = project_with(
        tmp_path,
        one='image = "one"\nwritable = false\nmounts = ["/a:/a"]\n[env]\nA = "1"\nB = "1"\n',
        two='image = "two"\nmounts = ["/b:/b", "/a:/a"]\n[env]\nB = "2"\nC = "2"\n',
        top='base_environment = ["one", "two"]\nworkdir = "/w"\nmounts = ["/c:/c"]\n[env]\nC = "3"\n',
    )
    merged = load_environment("top", project, {})
    assert (merged.image, merged.writable, merged.workdir) == ("two", False, "/w")
    assert [mount.source for mount in merged.mounts] == ["/a", "/b", "/c"]
    assert merged.env == {"A": "1", "B": "2", "C": "3"}
    assert merged.origins["env.B"].place.path.name == "two.toml" and merged.origins["env.B"].place.line == 4


def test_a_base_may_be_named_by_a_variable_and_what_it_says_is_told(tmp_path):
    project = project_with(
        tmp_path,
        base='image = "b"\nworkdir = "/b"\n[env]\nA = "1"\n',
        top='base_environment = [\n"${WHERE}/base.toml",\n]\nworkdir = ""\n[env]\nA = "2"\n',
    )
    merged = load_environment("top", project, {"WHERE": f"{tmp_path}/edf"})
    assert (merged.image, merged.workdir, merged.env) == ("b", None, {"A": "2"})
    told = {field: [origin.place.line for origin in origins] for field, origins in merged.replaced.items()}
    assert told == {"workdir": [2], "env.A": [4]}
    with pytest.raises(RunnerError, match=r"top\.toml:2: the variable WHERE in base_environment is not defined"):
        load_environment("top", project, {})


def test_an_annotation_has_its_line_however_it_is_written(tmp_path):
    text = '[annotations]\n"com.a.b" = "1"\ncom.a."c.d" = "2"\n[annotations.com.x]\ny = "3"\n'
    environment = environment_of(tmp_path, text)
    assert environment.annotations == {"com.a.b": "1", "com.a.c.d": "2", "com.x.y": "3"}
    lines = {name: environment.origins[f"annotations.{name}"].place.line for name in environment.annotations}
    assert lines == {"com.a.b": 2, "com.a.c.d": 3, "com.x.y": 5}


def test_values_say_where_they_came_from(tmp_path):
    environment = environment_of(tmp_path, 'image = "x"\nmounts = [\n"/a",\n]\n[env]\nA = "1"\n')
    told = emit_edf(replace(environment, env={**environment.env, "B": "2"}), sources="site s")
    place = f"{tmp_path}/it.toml"
    assert told.splitlines() == [
        f'image = "x"  # {place}:1',
        "entrypoint = false  # default",
        "writable = true  # default",
        "mounts = [",
        f'  "/a:/a",  # {place}:3',
        "]",
        "",
        "[env]",
        f'A = "1"  # {place}:6',
        'B = "2"  # site s',
    ]


def test_bases_that_go_round_or_too_deep_are_refused(tmp_path):
    circle = project_with(tmp_path, a='base_environment = "b"\n', b='base_environment = ["a"]\n')
    with pytest.raises(RunnerError, match="circular"):
        load_environment("a", circle, {})
    chain = {f"n{index}": f'base_environment = "n{index + 1}"\n' for index in range(12)}
    deep = project_with(tmp_path, **chain, n12='image = "x"\n')
    with pytest.raises(RunnerError, match="deeper than 10"):
        load_environment("n0", deep, {})
    assert load_environment("n2", deep, {}).image == "x"  # ten levels are allowed


def test_names_and_paths_are_looked_up_like_the_container_engine_does_and_the_project_wins(tmp_path):
    home, first = tmp_path / "home", tmp_path / "first"
    for folder in (home / ".edf", first, tmp_path / "shipped" / "edf"):
        folder.mkdir(parents=True)
    project = project_with(tmp_path, mine='image = "project"\n')
    (home / ".edf/mine.toml").write_text('image = "home"\n')
    (home / ".edf/own.toml").write_text('image = "home"\n')
    (first / "own.toml").write_text('image = "EDF_PATH"\n')
    (tmp_path / "shipped/edf/own.toml").write_text('image = "shipped"\n')
    (tmp_path / "shipped/edf/last.toml").write_text('image = "shipped"\n')
    environ = {"HOME": str(home)}
    path = {**environ, "EDF_PATH": f"/nowhere:{first}"}

    def image(name, environ):
        return load_environment(name, project, environ).image

    assert image("mine", environ) == image("mine.toml", environ) == "project"
    assert (image("own", environ), image("own", path)) == ("home", "EDF_PATH")
    assert image("last", path) == "shipped"
    assert image("./edf/mine.toml", environ) == image("./edf/mine", environ) == image("edf/mine.toml", {}) == "project"
    assert image(str(first / "own.toml"), environ) == image(str(first / "own"), environ) == "EDF_PATH"
    with pytest.raises(RunnerError) as caught:
        image("owm", environ)
    assert "did you mean 'own'?" in caught.value.fix and "the known names are last, mine, own" in caught.value.why
    with pytest.raises(RunnerError, match=r"environment file '\./nope' not found"):
        image("./nope", environ)


def test_an_emitted_edf_says_what_engines_disagree_on():
    text = emit_edf(Environment("x", None, "/x.sqsh", mounts=(Mount("/a", "/a"),)), "two\nlines")
    assert text == (
        '# two\n# lines\nimage = "/x.sqsh"\nentrypoint = false\nwritable = true\nmounts = [\n  "/a:/a",\n]\n'
    )


_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
_paths = texts.map(lambda text: "/" + literal(text).replace(":", ""))
_environments = st.builds(
    Environment,
    name=st.just(""),
    path=st.none(),
    image=texts.map(literal),
    workdir=st.none() | texts.filter(bool).map(literal),
    entrypoint=st.booleans(),
    writable=st.booleans(),
    mounts=st.lists(
        st.builds(Mount, _paths, _paths, st.lists(st.sampled_from(["ro", "private", "sqsh"]), max_size=2).map(tuple)),
        max_size=3,
        unique=True,
    ).map(tuple),
    env=st.dictionaries(_names, texts.map(literal), max_size=4),
    annotations=st.dictionaries(st.lists(_names, min_size=1, max_size=3).map(".".join), texts.map(literal), max_size=3),
    devices=st.lists(texts.map(literal), max_size=2, unique=True).map(tuple),
)


@given(_environments)
def test_any_environment_that_is_emitted_is_read_again_unchanged(tmp_path_factory, environment):
    again = environment_of(tmp_path_factory.getbasetemp(), emit_edf(environment, "by a test"))
    assert bare(again) == environment
    told = emit_edf(again, "by a test\x01", sources="the test")
    assert bare(environment_of(tmp_path_factory.getbasetemp(), told)) == environment


def test_the_corpus_survives_emit_and_read(tmp_path):
    env = {f"V{index}": literal(text) for index, text in enumerate(CORPUS)}
    again = environment_of(tmp_path, emit_edf(Environment("", None, "x", env=env)))
    assert [expand(value, {}, "v") for value in again.env.values()] == list(CORPUS)


def test_a_default_in_a_mount_does_not_cut_it():
    assert parse_mount("${A:-/x}/y:/z:ro") == Mount("${A:-/x}/y", "/z", ("ro",))


def test_expansion():
    variables = {"A": "1", "EMPTY": ""}
    assert expand("${A} $A $${A} ${B:-x} ${EMPTY:-y} ${EMPTY} ${B:-${A}2}", variables, "it") == "1 $A ${A} x y  12"
    with pytest.raises(RunnerError) as caught:
        expand("${B}", variables, "mounts.0")
    assert "the variable B in mounts.0 is not defined" in caught.value.what


@given(texts)
def test_literal_text_reaches_sarus_suite_unchanged(text):
    """Its expander: `$$` is a dollar sign, `$NAME` and `${NAME}` are variables, any other `$` stays."""
    written = sarus_text(literal(text), "it")
    variable = re.compile(r"\$\$|\$\{[^}]*\}|\$[\w]+")
    assert variable.sub(lambda match: "$" if match[0] == "$$" else "EXPANDED", written) == text


def test_variables_reach_sarus_suite_where_it_can_expand_them():
    assert sarus_text("$A ${B} ${C:-x y} $${D}", "it") == "$$A ${B} ${C:-x y} $${D}"
    with pytest.raises(RunnerError, match="cannot expand it"):
        sarus_text("${A:-${B}}", "it")


def test_the_edf_of_sarus_suite_keeps_dollar_signs_from_it(tmp_path):
    text = 'image = "a#b"\nmounts = ["${S}:/s"]\n[env]\nA = "$HOME $${X}"\n'
    attachment = attach(environment_of(tmp_path, text), load_site("generic-slurm"), "sarus", {"S": "/s"})
    emitted = tomllib.loads(attachment.files["environment.toml"])
    assert (emitted["env"]["A"], emitted["mounts"]) == ("$$HOME $${X}", ["${S}:/s"])
    for text, why in (
        ('image = "a/${B}"\n', "does not expand variables in an image"),
        ('image = "a/b"\nmounts = ["/a$b:/c"]\n', "expands a mount twice"),
    ):
        with pytest.raises(RunnerError) as caught:
            attach(environment_of(tmp_path, text), load_site("generic-slurm"), "sarus", {})
        assert why in caught.value.why


@given(texts)
def test_literal_text_expands_to_itself(text):
    assert expand(literal(text), {}, "it") == text


def test_a_site_without_containers_has_an_environment_without_an_image():
    root = Path(__file__).resolve().parents[2]
    project = Project(None, root, root)
    name, why = default_environment(project, load_site("twcc"))
    assert (name, why) == ("host", "the default without a container")
    environment = load_environment(name, project, {})
    assert (environment.image, dict(environment.env), environment.mounts) == ("", {}, ())


@pytest.mark.parametrize("name", ["cpu", "ngc-ds", "ngc-ds-alps", "ngc-ds-efa"])
def test_the_shipped_edfs_name_the_image_that_import_keeps(name):
    root = Path(__file__).resolve().parents[2]
    environment = load_environment(name, Project(None, root, root), {})
    recipe = {"cpu": "cpu", "ngc-ds-efa": "aws-deepspeed"}.get(name, "ngc-deepspeed")
    assert environment.image == f"${{RUNNER_IMAGES}}/{recipe}.sqsh"
    assert {environment.origins[key].place is not None for key in ("entrypoint", "writable")} == {True}
    assert not [key for key in environment.env if key.startswith(("NCCL_", "FI_CXI", "FI_MR"))]
