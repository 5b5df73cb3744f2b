"""The webhook is told what happens, in its own form and within its time; its address stands in no command line."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from runner.machine.secrets import looks_secret
from runner.runs.job import Restart
from tests.runs.scripts import run_locally, shell_job, write_run
from tests.test_machine_secrets import ORDINARY, SECRETS

EVENTS = "start first_step requeue failure end\n"


class Server(ThreadingHTTPServer):
    """A webhook that keeps what it is told, and answers when `answers` is set."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str, dict[str, Any]]] = []
        self.answers = threading.Event()
        self.answers.set()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/services/very-secret-path"

    def texts(self) -> list[str]:
        return [body.get("text", body.get("body")) for _, _, body in self.got]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, Server)
        self.server.got.append((self.command, self.path, json.loads(body)))
        self.server.answers.wait()
        self.send_response(200)
        self.end_headers()

    do_PUT = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def run(
    folder: Path,
    text: str,
    url: str,
    code: int = 0,
    events: str = EVENTS,
    restart: Restart | None = None,
    **environ: str,
) -> str:
    write_run(folder, shell_job(text, restart=restart))
    (folder / "notify").write_text(events)
    with (folder / "job.log").open("wb") as log:
        done = run_locally(folder, capture_output=False, stdout=log, stderr=log,
                           extra_environ={"RUNNER_WEBHOOK": url, "HOME": str(folder), **environ})  # fmt: skip
    said = (folder / "job.log").read_text(errors="replace")
    assert done.returncode == code, said
    return said


def test_start_first_step_and_end_are_told(server: Server, tmp_path: Path) -> None:
    steps = 'echo \'{"step": 1}\' >>"$RUNNER_RUN/metrics.jsonl"; '
    steps += 'until grep -q first_step "$RUNNER_ATTEMPT/notified"; do sleep 0.1; done'
    run(tmp_path / "sft-0001", steps, server.url)
    texts = server.texts()
    told = [f"started on {os.uname().nodename}", "the first step is done", "done"]
    assert [text.split(" (")[0] for text in texts] == [f"sft-0001: {each}" for each in told]
    assert all("attempt 1" in text for text in texts)
    assert {method for method, _, _ in server.got} == {"POST"}


def test_a_failure_brings_code_cause_last_words_and_what_to_do(server: Server, tmp_path: Path) -> None:
    """Any bytes of the log become text of the message; the value of a secret does not."""
    secrets = tmp_path / "secrets"
    secrets.write_text(f"HF_TOKEN=correct-horse-battery\nRUNNER_WEBHOOK={server.url}\n")
    secrets.chmod(0o600)
    words = r"""printf 'say "no"\\ \t\001 \303\251 \377 end\n'; echo token $HF_TOKEN; exit 7"""
    run(tmp_path / "a-1", words, "", 7, "failure\n", RUNNER_SECRETS=str(secrets))
    (text,) = server.texts()
    assert "ended by script_failure, exit code 7" in text and text.rstrip().endswith("runner why a-1")
    assert 'say "no"\\ \t é  end\n' in text
    assert "token (secret)" in text and "correct-horse" not in text


def secrets_file(folder: Path, text: str) -> str:
    path = folder / "secrets"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_a_secret_that_is_also_exported_is_masked(server: Server, tmp_path: Path) -> None:
    """The exported value wins, and no message shows it. Names that look secret count without a file."""
    secrets = secrets_file(tmp_path, f"HF_TOKEN=correct-horse-battery\nRUNNER_WEBHOOK={server.url}\n")
    exported = {"HF_TOKEN": "exported-horse-battery", "OPENAI_API_KEY": "only-exported-key", "WANDB_API_KEY": "w" * 40}
    words = 'echo "a $HF_TOKEN b $OPENAI_API_KEY c $WANDB_API_KEY d $RUNNER_WEBHOOK $MAX_TOKENS"; exit 7'
    run(tmp_path / "a-1", words, "", 7, "failure\n", RUNNER_SECRETS=secrets, MAX_TOKENS="123456789", **exported)
    (text,) = server.texts()
    assert "a (secret) b (secret) c (secret) d" in text and "123456789" in text
    for value in (*exported.values(), "very-secret-path"):
        assert value not in text


def test_a_restart_without_a_scheduler_still_masks(server: Server, tmp_path: Path) -> None:
    """The second attempt inherits what the first has exported."""
    secrets = secrets_file(tmp_path, f"PLAIN=correct-horse-battery\nRUNNER_WEBHOOK={server.url}\n")
    words = "echo token $PLAIN; exit 7"
    run(tmp_path / "a-1", words, "", 7, "failure\n", Restart(script_failure=1), RUNNER_SECRETS=secrets)
    (text,) = server.texts()
    assert "attempt 2" in text and "token (secret)" in text and "correct-horse" not in text


def test_a_secret_is_masked_before_a_line_is_cut(server: Server, tmp_path: Path) -> None:
    """Half of it would not be found; and the longer of two secrets goes first."""
    secrets = secrets_file(tmp_path, f"ONE=correct-horse\nTWO=correct-horse-battery\nRUNNER_WEBHOOK={server.url}\n")
    words = "printf '%0290d%s\\n' 0 $TWO; echo two $TWO one $ONE; exit 7"
    run(tmp_path / "a-1", words, "", 7, "failure\n", RUNNER_SECRETS=secrets)
    (text,) = server.texts()
    assert "correct" not in text and "battery" not in text and "two (secret) one (secret)" in text


def test_what_runner_why_quotes_is_masked_too(server: Server, tmp_path: Path) -> None:
    (tmp_path / "runner").write_text("#!/bin/sh\necho evidence: token correct-horse-battery\n")
    (tmp_path / "runner").chmod(0o755)
    secrets = secrets_file(tmp_path, f"HF_TOKEN=correct-horse-battery\nRUNNER_WEBHOOK={server.url}\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    run(tmp_path / "a-1", "exit 7", "", 7, "failure\n", RUNNER_SECRETS=secrets, PATH=path)
    (text,) = server.texts()
    assert "evidence: token (secret)" in text and "correct-horse" not in text


def test_a_file_of_secrets_may_have_windows_line_endings(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a-1", shell_job("true"))
    file = secrets_file(tmp_path, "HF_TOKEN=correct-horse-battery\r\nOTHER=!echo staple\r\n")
    program = '. payload/secrets.sh; read_secrets_file; printf "%s|" "$HF_TOKEN" "$OTHER"'
    done = subprocess.run(
        ("bash", "-c", program),
        cwd=folder,
        env={**os.environ, "RUNNER_SECRETS": file, "HF_TOKEN": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "correct-horse-battery|staple|"


NAMES = sorted({name.replace("-", "_") for name, _ in (*SECRETS, *ORDINARY)} | {"wandb_api_key", "KEYS", "PLACE"})


@pytest.mark.parametrize("name", NAMES)
def test_a_secret_looks_the_same_on_the_node_and_in_the_tool(tmp_path: Path, name: str) -> None:
    """payload/secrets.sh and machine/secrets.py judge names alike."""
    folder = write_run(tmp_path / "a-1", shell_job("true"))
    program = f"compgen() {{ :; }}; . payload/secrets.sh; {name}=some-long-value; looks_secret {name}"
    done = subprocess.run(("bash", "-c", program), cwd=folder)
    assert (done.returncode == 0) == looks_secret(name, "some-long-value")


def test_a_restart_is_told_and_the_failure_only_when_none_follows(server: Server, tmp_path: Path) -> None:
    run(tmp_path / "a-1", "exit 5", server.url, 5, "requeue failure end\n", Restart(script_failure=1))
    assert [text.split(" (")[0] for text in sorted(server.texts(), reverse=True)] == [
        "a-1: script_failure: another attempt follows", "a-1: ended by script_failure, exit code 5"]  # fmt: skip


def test_a_message_is_sent_before_the_job_is_over(server: Server, tmp_path: Path) -> None:
    """Slurm kills what is left of a job: a slow message about its start must not be left."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/curl").write_text(f'#!/bin/sh\nsleep 1\nexec {shutil.which("curl")} "$@"\n')
    (tmp_path / "bin/curl").chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    run(tmp_path / "a-1", "exit 3", server.url, 3, "start\n", PATH=path)
    assert [text.partition(" on ")[0] for text in server.texts()] == ["a-1: started"]


def test_matrix_has_its_own_form(server: Server, tmp_path: Path) -> None:
    room = "/_matrix/client/v3/rooms/!a:b/send/m.room.message"
    run(
        tmp_path / "a-1", "true", server.url.replace("/services/very-secret-path", f"{room}?access_token=t"), 0, "end\n"
    )
    ((method, path, body),) = server.got
    assert method == "PUT" and body["msgtype"] == "m.text" and body["body"].startswith("a-1: done")
    assert path.startswith(f"{room}/") and path.endswith("?access_token=t")


def test_slack_does_not_take_words_of_the_log_for_its_own(server: Server, tmp_path: Path) -> None:
    """A traceback has `<module>`, and a log may have `<!channel>`, a call to everybody. Others get it as it is."""
    words = "echo 'in <module> a && b <!channel>'; exit 7"
    run(tmp_path / "a-1", words, server.url, 7, "failure\n")
    run(tmp_path / "a-2", words, server.url.replace("/services", "/hooks.slack.com/services"), 7, "failure\n")
    plain, escaped = server.texts()
    assert "in <module> a && b <!channel>\n" in plain
    assert "in &lt;module&gt; a &amp;&amp; b &lt;!channel&gt;\n" in escaped


def test_a_long_message_to_discord_has_its_beginning_and_its_end(server: Server, tmp_path: Path) -> None:
    """Discord refuses more than 2000 characters, also in Slack's format (thp/urlwatch#353)."""
    words = """for n in 1 2 3 4 5 6 7 8 9; do printf '%s %0250d\\n' "\303\244" "$n"; done; exit 7"""
    hook = server.url.replace("/services/very-secret-path", "/api/webhooks/1/secret/slack")
    run(tmp_path / "a-1", words, server.url, 7, "failure\n")
    run(tmp_path / "a-1b", words, hook, 7, "failure\n")
    whole, short = server.texts()
    assert len(whole) > 2000 >= len(short) > 1700
    assert short.startswith("a-1b: ended by script_failure") and short.rstrip().endswith("runner why a-1b")


def test_events_that_nobody_wants_and_runs_without_a_webhook_are_silent(server: Server, tmp_path: Path) -> None:
    run(tmp_path / "a-1", "true", server.url, events="failure\n")
    run(tmp_path / "a-2", "true", "")
    assert server.got == []


@pytest.mark.parametrize("tool", ["curl", "python3", "wget"])
def test_the_address_is_in_no_command_line_whatever_sends_it(server: Server, tmp_path: Path, tool: str) -> None:
    """Each program that a node may have; a wrapper writes its words down."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for path in Path(folder).iterdir():
            if path.name not in ("curl", "python3", "wget", "runner") and not (tools / path.name).exists():
                (tools / path.name).symlink_to(path)
    real = Path(f"/usr/bin/{tool}")
    if not real.exists():
        pytest.skip(f"{tool} is not in /usr/bin")
    (tools / tool).write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>{tmp_path}/words\nexec {real} "$@"\n')
    (tools / tool).chmod(0o755)
    said = run(tmp_path / "a-1", "exit 3", server.url, 3, "failure\n", PATH=str(tools))
    assert [text.split(" (")[0] for text in server.texts()] == ["a-1: ended by script_failure, exit code 3"], said
    assert "very-secret" not in (tmp_path / "words").read_text() + said
    assert shutil.which(tool, path=str(tools))


def test_a_webhook_that_is_gone_or_hangs_does_not_harm_the_job(server: Server, tmp_path: Path) -> None:
    said = run(tmp_path / "a-1", "exit 4", "http://127.0.0.1:9/nobody", 4, "end failure\n")
    assert "the message about failure was not posted" in said and "/nobody" not in said
    server.answers.clear()
    try:
        run(tmp_path / "a-2", "true", server.url, 0, "end\n")
    finally:
        server.answers.set()
