"""runner adds ARG lines after each FROM, whatever the Containerfile looks like."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.images.build.build import BuildProgress
from runner.images.build.copies import check_copies
from runner.images.recipe import Recipe, declares_base, instructions, with_arguments
from runner.machine.report import Quiet

TWO_STAGES = """\
# a comment
ARG BASE=docker.io/library/debian
FROM \\
  # a comment inside
  ${BASE} AS one
RUN echo a \\
 && echo "FROM not"

from one as two
RUN <<EOF
FROM here it is only text
EOF
COPY --from=one /a /b
"""


def test_arguments_follow_each_from() -> None:
    text = with_arguments(TWO_STAGES, {"A": "/x", "B": "/y"})
    assert text.splitlines()[5] == "ARG A=/x B=/y"
    assert text.splitlines()[10] == "ARG A=/x B=/y"
    assert text.count("ARG A=") == 2


def test_nothing_to_add_changes_nothing() -> None:
    assert with_arguments(TWO_STAGES, {}) == TWO_STAGES


@given(
    st.lists(
        st.sampled_from(
            ["FROM a", "from b AS c", "RUN x", "# FROM no", "", "RUN a \\\n FROM b", "RUN <<X\nFROM y\nX", "  "]
        )
    )
)  # fmt: skip
def test_without_our_lines_the_file_is_what_it_was(parts: list[str]) -> None:
    text = "\n".join(parts) + "\n"
    added = with_arguments(text, {"NAME": "value"})
    left = [line for line in added.splitlines() if line != "ARG NAME=value"]
    assert "\n".join(left).rstrip("\n") == text.rstrip("\n")
    froms = [words for _, _, words in instructions(text) if words.split()[0].upper() == "FROM"]
    assert added.count("ARG NAME=value") == len(froms)


@pytest.mark.parametrize(
    "command",
    [
        "RUN echo 'cat <<EOF'",
        'RUN echo "usage: cat <<EOF" && true',
        'RUN echo "a \\" cat <<EOF"',
        "RUN echo $((1 << X))",
        "RUN echo $((1<<X))",
        'RUN cat <<<"$WORDS"',
        "RUN cat <<< WORDS",
        "RUN <<EOF\ntext\nFROM no\nEOF",
        "RUN <<'EOF'\nFROM no\nEOF",
        'RUN <<-"EOF" bash -e\n\tFROM no\n\tEOF',
        "RUN cat <<A > /a && cat <<B > /b\nFROM no\nA\nFROM no\nB",
        "RUN python3 3<<EOF\nFROM no\nEOF",
        "COPY <<EOF /etc/x\nFROM no\nEOF",
        "RUN (cat <<EOF)\nFROM no\nEOF",
        "RUN cat <<EOF; echo 'it is done'\nFROM no\nEOF",
        "CMD cat <<EOF",
        "RUN echo a && \\\n\n  cat <<EOF\nFROM no\nEOF",
    ],
)
def test_only_real_heredocs_hide_the_lines_that_follow(command: str) -> None:
    text = f"FROM a\n{command}\nFROM b\nRUN last\n"
    froms = [words for _, _, words in instructions(text) if words.startswith("FROM")]
    assert froms == ["FROM a", "FROM b"]


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        ("COPY a.txt sub sub/b.txt ./sub/ /x/", None),
        ("COPY --chown=1:1 --link no.txt /x", "3: 'no.txt'"),
        ("add sub \\\n  # a comment\n\n  no.txt /x", "3: 'no.txt'"),
        ('COPY ["a.txt", "/no.txt", "/x"]', "3: 'no.txt'"),
        ("RUN --mount=type=cache,target=/c --mount=type=bind,source=no.txt,target=/n cat /n", "3: 'no.txt'"),
        ("RUN --mount=target=. --mount=from=x,src=no.txt,target=/n cat /n", None),
        ("COPY . /x\nCOPY ${NO} no* <<EOF 'no a' https://h/no ../no /x\nEOF", None),
        ("COPY --from=one no.txt /x", None),
        ("COPY link/no.txt /x", None),
        ("COPY no.txt /x\nFROM scratch\nCOPY a.txt /x", None),
        ("COPY no.txt /x\nFROM scratch\nCOPY --from=TWO /x /x", "3: 'no.txt'"),
        ("COPY no.txt /x\nFROM scratch\nRUN --mount=type=bind,from=1,target=/n true", "3: 'no.txt'"),
        ("COPY no.txt /x\nFROM two\nFROM scratch AS four\nFROM 2", "3: 'no.txt'"),
    ],
)
def test_a_file_that_is_not_in_the_context_is_refused_before_the_build(
    tmp_path: Path, lines: str, missing: str | None
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").touch()
    (tmp_path / "sub/b.txt").touch()
    (tmp_path / "link").symlink_to("sub")
    containerfile = tmp_path / "Containerfile.n"
    containerfile.write_text(f"FROM a AS one\nFROM one AS two\n{lines}\n")
    recipe = Recipe("n", containerfile, tmp_path, containerfile, context=None)
    if missing is None:
        check_copies(recipe)
        return
    with pytest.raises(RunnerError) as caught:
        check_copies(recipe)
    assert caught.value.what == f"{containerfile}:{missing} is not in the build context"
    assert (caught.value.why, caught.value.fix) == (
        f"there is no file {tmp_path / 'no.txt'}",
        "create it, or correct that line",
    )


def test_a_file_outside_of_the_context_needs_a_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "pins.txt").touch()
    containerfile = tmp_path / "docker/Dockerfile"
    containerfile.write_text("FROM a\nCOPY pins.txt /\n")
    recipe = Recipe("docker", containerfile, containerfile.parent, containerfile, context=None)
    with pytest.raises(RunnerError) as caught:
        check_copies(recipe)
    toml = 'containerfile = "docker/Dockerfile" and context = ["pins.txt", …]'
    assert f"write {tmp_path}/containers/docker.toml with {toml}" in caught.value.fix
    with pytest.raises(RunnerError, match="is not in the build context") as caught:
        check_copies(replace(recipe, root=tmp_path, context=("docker",)))
    assert caught.value.fix == "add it to `context`"
    (tmp_path / "pins.txt").unlink()
    with pytest.raises(RunnerError) as caught:
        check_copies(replace(recipe, root=tmp_path, context=(".",)))
    assert caught.value.why == f"there is no file {tmp_path / 'pins.txt'}"


@pytest.mark.parametrize(
    ("text", "declared"),
    [
        ("ARG BASE\nFROM ${BASE}\n", True),
        ("# x\narg BASE=docker.io/x\nFROM ${BASE}\n", True),
        ("FROM x\nARG BASE\n", False),
        ("ARG BASETAG=1\nFROM x:${BASETAG}\n", False),
        ("", False),
    ],
)
def test_whether_the_base_reaches_the_file(text: str, declared: bool) -> None:
    assert declares_base(text) is declared


# pasted from podman 4.3.1, a file with two stages
PODMAN = """\
[1/2] STEP 1/3: FROM docker.io/library/debian AS one
[1/2] STEP 2/3: ARG A=/x
--> abe3b88cd04
[1/2] STEP 3/3: RUN echo a
a
--> a2d52d28f48
[2/2] STEP 1/4: FROM one AS two
[2/2] STEP 2/4: ARG A=/x
--> 8bf806a6e6d
[2/2] STEP 3/4: COPY --from=one /a /b
Error: building at STEP "COPY --from=one /a /b": no such file
"""


def test_progress_names_the_steps_of_the_users_own_file() -> None:
    report = Quiet()
    progress = BuildProgress(report, hide_arguments=True, hide_labels=1)
    for line in PODMAN.splitlines():
        progress.line(line)
    assert [line for line in report.lines if line.startswith("step")] == [
        "step 1/2 of stage 1/2: FROM docker.io/library/debian AS one",
        "step 2/2 of stage 1/2: RUN echo a",
        "step 1/2 of stage 2/2: FROM one AS two",
        "step 2/2 of stage 2/2: COPY --from=one /a /b",
    ]
    assert progress.step == "step 2/2 of stage 2/2: COPY --from=one /a /b"
    assert list(progress.last_lines) == ['Error: building at STEP "COPY --from=one /a /b": no such file']


def test_progress_reads_dockers_words() -> None:
    report = Quiet()
    progress = BuildProgress(report)
    for line in ("Step 1/3 : FROM scratch", " ---> Running in 1", "#7 [build 2/4] RUN make", "#7 0.3 made"):
        progress.line(line)
    steps = [line for line in report.lines if line.startswith("step")]
    assert steps == ["step 1/3: FROM scratch", "step 2/4 of stage build: RUN make"]
