"""The lock says what a run was made of, is TOML that reads back, and holds no secret."""

import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.images.squashfs_file import Squashfs
from runner.runs.image import LaunchImage
from runner.runs.lock import lock_text, recipe
from runner.runs.rerun import Locked, changed_script
from runner.runs.secrets import HIDDEN, hide_values, hide_words

ANY_TEXT = st.text(st.characters(exclude_categories=("Cs",)))


@given(st.dictionaries(ANY_TEXT, ANY_TEXT | st.integers(-(2**62), 2**62) | st.booleans() | st.lists(ANY_TEXT)))
def test_any_value_reads_back_as_it_was(values: dict[str, object]) -> None:
    read = tomllib.loads(lock_text({"job.values": values}))  # type: ignore[dict-item]
    assert (read["job"]["values"] if values else {}) == values


def test_what_is_not_known_is_not_written() -> None:
    assert tomllib.loads(lock_text({"image": {"digest": None, "path": "/a.sqsh"}, "empty": {}})) == {
        "image": {"path": "/a.sqsh"}
    }


def test_the_recipe_is_that_of_the_images_labels() -> None:
    """Name, content hash and the base's digest; nothing for a file that `runner build` had no part in."""
    labels = {
        "runner.recipe": "cpu",
        "runner.content": "0123456789ab",
        "runner.recipe.files": "f" * 64,
        "org.opencontainers.image.base.name": "docker.io/library/python:3.11",
        "org.opencontainers.image.base.digest": "sha256:" + "d" * 64,
    }
    squashfs = Squashfs(Path("/a-1.sqsh"), Path("/a.sqsh"), "i" * 64, "s" * 64, 4, "amd64", labels=labels)
    assert tomllib.loads(lock_text({"recipe": recipe(LaunchImage("/a-1.sqsh", squashfs))}))["recipe"] == {
        "name": "cpu",
        "content": "0123456789ab",
        "files_sha256": "f" * 64,
        "base": "docker.io/library/python:3.11",
        "base_digest": "sha256:" + "d" * 64,
    }
    assert recipe(LaunchImage("/a-1.sqsh", replace(squashfs, labels={}))) == {}
    assert recipe(LaunchImage("docker://ubuntu")) == {}


def test_command_lines_lose_their_secrets_only() -> None:
    words = ("launch", "--env", "cpu", "--", "x.py", "--wandb-key", "abc", "--hf_token=abc", "A_TOKEN=abc", "--lr", "1")
    assert hide_words(words) == (
        *words[:6],
        HIDDEN,
        f"--hf_token={HIDDEN}",
        f"A_TOKEN={HIDDEN}",
        "--lr",
        "1",
    )
    assert hide_values({"HF_TOKEN": "abc", "LANG": "C"}) == {"HF_TOKEN": HIDDEN, "LANG": "C"}


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "://" * 30_000, "eyJ" + "a" * 100_000, "hf_" * 30_000, "-----BEGIN " * 9000]
)
def test_long_texts_are_judged_at_once(text: str) -> None:
    """No pattern goes over a text twice: a 100 kB argument must not cost a second."""
    started = time.process_time()
    hide_words((text, "--note", text))
    assert time.process_time() - started < 1


def test_a_rerun_needs_the_batch_script_or_its_copy(tmp_path: Path) -> None:
    """Without a copy, a script that has changed is submitted as it is now; one that is gone cannot be."""
    script, copy = tmp_path / "a.sh", tmp_path / "run/script/a.sh"
    locked = Locked(tmp_path / "run/lock.toml", {"run": {"script_sha256": "0" * 64}, "job": {"batch": str(script)}})
    with pytest.raises(RunnerError, match=r"run cannot be rerun") as raised:
        changed_script(locked)
    assert raised.value.why == f"{script} no longer exists or cannot be read, and the run folder has no copy"
    script.write_text("#!/bin/sh\n")
    assert changed_script(locked) == (str(script), False)
    copy.parent.mkdir(parents=True)
    copy.write_text("#!/bin/sh\n")
    script.unlink()
    assert changed_script(locked) == (str(script), True)
    assert changed_script(replace(locked, tables={"run": {}, "job": {}})) == ("", False)
