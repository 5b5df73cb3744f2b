"""Each rule finds the file that breaks it alone, and nothing in its mended twin."""

from dataclasses import replace

import pytest

from runner.environments.lint.rules import lint
from runner.site_files import load_site
from tests.environments.inside import environment_of


@pytest.fixture
def codes(tmp_path):
    """codes(EDF, engine): code -> (severity, line) of each finding, on a machine where /there and the image exist."""
    (tmp_path / "there").mkdir()
    (tmp_path / "a.sqsh").write_bytes(b"hsqs")
    environ = {"HOME": str(tmp_path), "RUNNER_IMAGES": str(tmp_path), "HERE": str(tmp_path)}

    def run(text: str, engine: str = "sandbox", scheduler: str = "local") -> dict[str, tuple[str, int | None]]:
        if "image" not in text:
            text = 'image = "${RUNNER_IMAGES}/a.sqsh"\n' + text
        site = replace(load_site("local"), scheduler=scheduler)
        found = lint(environment_of(tmp_path, text), site, engine, environ)
        assert all(finding.reason and finding.fix for finding in found)
        return {finding.code: (finding.severity, finding.place.line if finding.place else None) for finding in found}

    return run


CASES = [
    # code, severity, line, the broken file, its mended twin, engine
    ("undefined-variable", "error", 2, 'mounts = ["${NOPE}:/x"]\n', 'mounts = ["${HERE}/there:/x"]\n', "sandbox"),
    ("undefined-variable", "warning", 3, '[env]\nA = "${NOPE}"\n', '[env]\nA = "${NOPE:-x}"\n', "sandbox"),
    ("variable-without-braces", "error", 2, 'workdir = "/w/$HERE"\n', 'workdir = "/w/${HERE}"\n', "sandbox"),
    ("variable-without-braces", "warning", 3, '[env]\nA = "$HERE"\n', '[env]\nA = "${HERE}"\n', "sandbox"),
    ("relative-squashfs", "error", 1, 'image = "a.sqsh"\n', "", "ce"),
    ("image-missing", "error", 1, 'image = "/nowhere/b.sqsh"\n', "", "sandbox"),
    ("mount-source-missing", "error", 2, 'mounts = ["/nowhere:/x"]\n', 'mounts = ["${HERE}/there:/x"]\n', "sandbox"),
    ("secret-value", "error", 3, '[env]\nHF_TOKEN = "x"\n', '[env]\nHF_TOKEN = "${HF_TOKEN:-}"\n', "sandbox"),
    ("secret-value", "error", 3, '[env]\nA = "hf_abcdefghijklmnopqrst"\n', '[env]\nA = "hf_hub"\n', "sandbox"),
    ("stale-tuning", "warning", 3, '[env]\nNCCL_PROTO = "^LL128"\n', '[env]\nNCCL_DEBUG = "INFO"\n', "ce"),
    ("engine-refuses", "error", 3, '[annotations]\na.b = "c"\n', "", "sandbox"),
]


@pytest.mark.parametrize(("code", "severity", "line", "broken", "mended", "engine"), CASES)
def test_a_rule_finds_its_mutant_and_leaves_the_mended_twin(codes, code, severity, line, broken, mended, engine):
    assert codes(broken, engine) == {code: (severity, line)}
    assert codes(mended, engine) == {}


def test_a_mount_source_may_be_missing_on_a_login_node(codes):
    assert codes('mounts = ["/nowhere:/x"]\n', "ce", "slurm") == {"mount-source-missing": ("warning", 2)}


def test_the_run_folder_is_not_missing(codes):
    assert codes('mounts = ["${RUNNER_RUN}:${RUNNER_RUN}"]\n') == {}
