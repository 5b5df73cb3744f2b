"""A secret comes from a file that only the user can read, or the environment, and no file of ours ever holds one."""

import os
import subprocess
from pathlib import Path

import pytest

from runner.environments.lint.check import Linter
from runner.environments.lint.finding import Setting
from runner.errors import RunnerError
from runner.machine import files, folders, secrets
from runner.project import Project
from runner.runs.adopt.adopted import Adopted
from runner.runs.secrets import refuse_in, write_record
from runner.site_files import load_site

VALUE = "correct-horse-battery"
# The one table of what is a secret: records, the linter, `env adopt` and the shell scripts all decide by it.
SECRETS = (
    ("HF_TOKEN", "abc"),
    ("WANDB_API_KEY", "0123456789abcdef"),
    ("wandb-key", "x"),
    ("DB_PASSWORD", "x"),
    ("AUTH", "correct-horse"),
    ("SLACK_WEBHOOK", "https://hooks.example.org/T0/B0"),
    ("AWS_SECRET_ACCESS_KEY", "correct-horse"),
    ("GIT_CREDENTIALS", "correct-horse"),
    ("anything", "hf_" + "a" * 34),
    ("anything", "ya29.a0AfH6SMC-x_12345"),
    ("anything", "ASIA" + "A1" * 8),
    ("PROXY", "http://user:word@proxy:3128"),
    ("x", "-----BEGIN OPENSSH PRIVATE KEY-----"),
    ("y", "ghp_" + "1" * 36),
    ("z", "sk-proj-" + "a1" * 20),
    ("z", "--key=sk-" + "a1" * 20),
)
ORDINARY = (
    ("max_tokens", "many"),
    ("tokens", "1024"),
    ("TOKEN_BUDGET", "many-of-them"),
    ("HF_TOKEN_PATH", "/home/me/token"),
    ("SSH_KEY", "/home/me/.ssh/id"),
    ("SORT_KEY", "name-and-time"),
    ("USE_AUTH", "true"),
    ("SSH_AUTH_SOCK", "name-of-socket"),
    ("PATH", "/usr/bin"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("URL", "https://example.org/a@b"),
    ("HF_TOKEN", ""),
    ("KEYBOARD", "us"),
    ("MONKEY", "x"),
    ("NAME", "multi-task-finetuning-on-everything"),
    ("MODEL", "org/mask-generation-with-transformers"),
)
CASES = [*((*case, True) for case in SECRETS), *((*case, False) for case in ORDINARY)]


@pytest.mark.parametrize(
    ("name", "value", "secret"), [(*case, True) for case in SECRETS] + [(*case, False) for case in ORDINARY]
)
def test_a_secret_is_known_by_its_name_or_form(name: str, value: str, secret: bool) -> None:
    assert secrets.looks_secret(name, value) == secret


@pytest.mark.parametrize(
    ("name", "value", "secret"), [(*case, True) for case in SECRETS] + [(*case, False) for case in ORDINARY]
)
def test_linter_and_adopt_decide_alike(name: str, value: str, secret: bool, tmp_path: Path) -> None:
    variable = name.replace("-", "_")
    (tmp_path / "it.toml").write_text(f'image = "/i.sqsh"\n[env]\n{variable} = "{value}"\n')
    setting = Setting(load_site("local", {}), "ce", {}, here=False)
    checked = Linter(Project(tmp_path, tmp_path, tmp_path), setting).check(str(tmp_path / "it.toml"))
    assert ("secret-value" in [finding.code for each in checked for finding in each.findings]) == secret
    adopted = Adopted(None)
    adopted.variable(variable, value, "-e")
    assert adopted.env == ({} if secret or not value else {variable: value})


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "runner").mkdir()
    return {"HOME": "/nobody", "XDG_CONFIG_HOME": str(tmp_path)}


def put(environ: dict[str, str], text: str, mode: int = 0o600) -> Path:
    path = secrets.path(environ)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_file_is_in_the_users_settings_or_where_a_variable_says() -> None:
    assert secrets.path({"HOME": "/h"}) == Path("/h/.config/runner/secrets")
    assert secrets.path({"HOME": "/h", "RUNNER_SECRETS": "/x"}) == Path("/x")


def test_a_file_that_others_can_read_is_refused(environ: dict[str, str]) -> None:
    assert secrets.check(environ) == ()
    for mode in (0o644, 0o640, 0o604):
        put(environ, "A_TOKEN=x\n", mode)
        with pytest.raises(RunnerError) as caught:
            secrets.check(environ)
        assert "chmod 600" in caught.value.fix
    put(environ, f"# mine\n\nHF_TOKEN={VALUE}\n")
    assert secrets.check(environ) == ("HF_TOKEN",)


@pytest.mark.parametrize("line", [f"export HF_TOKEN={VALUE}", f"HF_TOKEN = {VALUE}", VALUE, f"1A={VALUE}"])
def test_a_line_that_is_none_is_named_by_its_number_and_never_repeated(environ: dict[str, str], line: str) -> None:
    put(environ, f"A_TOKEN=b\n{line}\n")
    with pytest.raises(RunnerError) as caught:
        secrets.check(environ)
    assert ":2:" in caught.value.what and VALUE not in str(caught.value)


def test_no_record_is_written_that_holds_a_known_secret(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it comes from the user's file or from the environment; the error does not tell it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", environ["XDG_CONFIG_HOME"])
    monkeypatch.setenv("WANDB_API_KEY", "from-the-environment")
    put(environ, f"HF_TOKEN={VALUE}\n")
    for name, value in (("HF_TOKEN", VALUE), ("WANDB_API_KEY", "from-the-environment")):
        for write in (lambda text: write_record(tmp_path / "f", text), lambda text: refuse_in({"f": text})):
            with pytest.raises(RunnerError) as caught:
                write(f"x={value}.")
            assert name in caught.value.what and value not in str(caught.value)
            assert not (tmp_path / "f").exists()
    write_record(tmp_path / "f", "HF_TOKEN")


def test_writing_a_file_asks_no_keyring_and_refuses_no_word(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `runner import` writes beside an image holds no words of the user's but its name."""
    monkeypatch.setenv("XDG_CONFIG_HOME", environ["XDG_CONFIG_HOME"])
    monkeypatch.setenv("MY_KEY", "production")
    put(environ, f"HF_TOKEN=!touch {tmp_path}/asked; echo {VALUE}\n")
    files.write(tmp_path / "production.json", '{"path": "production.sqsh"}')
    folders.fill(tmp_path, {"f": "production"})
    assert not (tmp_path / "asked").exists()


def test_short_values_paths_and_ordinary_variables_are_no_secrets() -> None:
    found = secrets.known({"HOME": "/h", "A_TOKEN": "short", "SSH_KEY": "/home/me/.ssh/id", "LANG": "en_US.UTF-8",
                           "max_tokens": "1024000000", "B_TOKEN": "long-enough"})  # fmt: skip
    assert found == {"long-enough": "B_TOKEN"}


LOGIN, KEY = "hf_of-the-login-123", "0123456789abcdef0123"
NETRC = f"machine github.com\n  login me\n  password of-github\nmachine api.wandb.ai\n  login user\n  password {KEY}\n"


@pytest.mark.parametrize(
    ("files", "variables", "expected"),
    [
        ({".cache/huggingface/token": LOGIN, ".netrc": NETRC}, {}, (LOGIN, KEY)),
        ({"hub/token": f"{LOGIN}\n", ".cache/huggingface/token": "hf_other"}, {"HF_HOME": "{home}/hub"}, (LOGIN, "")),
        ({"mine": LOGIN, "rc": NETRC}, {"HF_TOKEN_PATH": "{home}/mine", "NETRC": "{home}/rc"}, (LOGIN, KEY)),
        ({".netrc": f"machine w.org login user password {KEY}"}, {"WANDB_BASE_URL": "https://w.org:8080/x"}, ("", KEY)),
        ({".netrc": "machine api.wandb.ai login user"}, {}, ("", "")),
        # Windows line endings
        ({".cache/huggingface/token": f"{LOGIN}\r\n", ".netrc": f"machine api.wandb.ai\r\n  password {KEY}\r\n"}, {},
         (LOGIN, KEY)),
        ({}, {}, ("", "")),
        # a variable that is set, even to nothing, keeps its value
        ({".cache/huggingface/token": LOGIN, ".netrc": NETRC}, {"HF_TOKEN": "", "WANDB_API_KEY": "of-the-shell"},
         ("", "of-the-shell")),
        # so does a line of the file
        ({".cache/huggingface/token": LOGIN, ".config/runner/secrets": "HF_TOKEN=\n"}, {"XDG_CONFIG_HOME": ""},
         ("", "")),
    ],
)  # fmt: skip
def test_logins_in_the_home_folder_reach_the_job_and_no_record(
    environ: dict[str, str], tmp_path: Path, files: dict[str, str], variables: dict[str, str], expected: tuple[str, str]
) -> None:
    """Those of `hf auth login` and `wandb login`: a container often does not see the home folder."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    home = {**environ, "HOME": str(tmp_path), "PATH": os.defpath}
    home |= {name: value.format(home=tmp_path) for name, value in variables.items()}
    payload = Path(secrets.__file__).parents[1] / "runs/payload/secrets.sh"
    script = '. "$1"; read_secrets; echo "${HF_TOKEN:-},${WANDB_API_KEY:-}"; masked "${HF_TOKEN:-}${WANDB_API_KEY:-}"'
    done = subprocess.run(("bash", "-euc", script, "-", payload), capture_output=True, text=True, env=home, check=True)
    assert done.stdout == f"{','.join(expected)}\n{'(secret)' * sum(map(bool, expected))}"
    assert done.stderr == ""
    assert {value for value in expected if value} <= secrets.known(home).keys()
    assert (secrets.value_for_job("HF_TOKEN", home), secrets.value_for_job("WANDB_API_KEY", home)) == expected


def test_a_value_may_come_from_a_command_such_as_a_keyrings(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the node, where the batch script asks it, and here, where no file may hold it; one that fails is said."""
    monkeypatch.setenv("XDG_CONFIG_HOME", environ["XDG_CONFIG_HOME"])
    (tmp_path / "ring").write_text(f"{VALUE}\n")
    file = put(environ, f"HF_TOKEN=!cat {tmp_path}/ring\nA_TOKEN=!cat {tmp_path}/none\nB_TOKEN=plain-as-before\n")
    assert secrets.check(environ) == ("HF_TOKEN", "A_TOKEN", "B_TOKEN")
    found = [secrets.value_for_job(name, environ) for name in ("HF_TOKEN", "A_TOKEN", "B_TOKEN")]
    assert found == [VALUE, "", "plain-as-before"]
    assert secrets.value_for_job("B_TOKEN", {**environ, "B_TOKEN": "exported"}) == "exported"
    file.chmod(0o644)
    assert secrets.value_for_job("B_TOKEN", environ) == ""
    file.chmod(0o600)
    with pytest.raises(RunnerError, match="HF_TOKEN"):
        write_record(tmp_path / "f", f"x={VALUE}")
    payload = Path(secrets.__file__).parents[1] / "runs/payload/secrets.sh"
    script = 'say() { echo "said: $*"; }; . "$1"; read_secrets; echo "$HF_TOKEN ${A_TOKEN-unset} $B_TOKEN"'
    done = subprocess.run(
        ("bash", "-euc", script, "-", payload), capture_output=True, text=True, env={**environ, "PATH": os.defpath}
    )
    assert done.stderr == ""
    assert (
        done.stdout == f"said: not reading A_TOKEN, because its command in {file} failed, or took longer than 10 s\n"
        f"{VALUE} unset plain-as-before\n"
    )


SRC = Path(secrets.__file__).parents[1]
# How two scripts sort the variables NAME=VALUE into exported ones and words of `env`. Only `exec` is replaced.
SORTED_BY = {
    "runs/payload/batch.sh": r"""
        eval "$(sed -n '/^may_be_secret() /p; /^become() {/,/^}/p' "$0")"; variables=("$@")
        exec() { printf '%s\n' "${@:2}"; }; become; echo; env""",
    "environments/engines/environment.sh": r"""
        . "$0"; for word; do inside[${word%%=*}]=${word#*=}; done
        list_inside; printf '%s\n' "${final[@]}"; echo; env""",
}


def test_a_secret_is_exported_and_is_no_word_of_a_command_line() -> None:
    """Every user of the node can read command lines. Here more names count as secrets, and URLs with a password."""
    names = {name.replace("-", "_") for name, *_ in CASES} - {"PATH"}
    secret = {name for name in names if secrets.is_secret_name(name)} | {
        "_HF_TOKEN",
        "hf_token",
        "DB_PASS",
        "TOKEN_2",
        "secret_names",
        "MYSQL_PWD",
        "GH_PAT",
        "SENTRY_DSN",
    }
    urls = {"https_proxy=http://u:hunter22@proxy:3128", "DATABASE_URL=postgres://u:hunter22@db/x"}
    words = {f"{name}=value" for name in names | secret} | urls | {"http_proxy=http://proxy:3128", "PATHS=value"}
    found = []
    for path, program in SORTED_BY.items():
        argv = ("bash", "-euc", program, str(SRC / path), *words)
        done = subprocess.run(argv, capture_output=True, text=True, check=True, env={"PATH": os.defpath})
        listed, exported = (set(part.splitlines()) & words for part in done.stdout.split("\n\n"))
        assert listed | exported == words and not listed & exported
        assert {f"{name}=value" for name in secret} | urls <= exported
        found.append(listed)
    assert (
        found[0] == found[1] >= {"URL=value", "PROXY=value", "x=value", "http_proxy=http://proxy:3128", "PATHS=value"}
    )


def test_a_secret_in_json_is_no_placeholder_of_an_example() -> None:
    from runner.machine.secrets import is_placeholder

    assert all(map(is_placeholder, ("<your-token>", "[token]", "{{ token }}", "hf_your_token_here", "CHANGE_THIS")))
    assert not any(map(is_placeholder, ('{"private_key": "MIIE"}', '["a", "b"]', "hf_AbCdEf123456")))
