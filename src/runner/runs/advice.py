"""What would reduce a class of an account: said only if the files of the run show that it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runner.errors import RunnerError
from runner.project import page
from runner.runs import hub, lock
from runner.runs.account import Account
from runner.runs.attempt import Attempt

Tables = Mapping[str, Mapping[str, Any]]
"""those of lock.toml"""

_NOTICED = "no progress for "  # a hang that hang_seconds ended (payload/watch.sh)
_WITHOUT_SCHEDULER = ("in_place", "local")
_MACHINE = "node_failure"
_PROGRAM = ("hang", "script_failure")


def advice(name: str, account: Account) -> str:
    """The setting that reduces the time of a class; empty if none is known."""
    try:
        tables = lock.load(account.run.folder / "lock.toml")
    except RunnerError:
        tables = {}
    return _ADVICE[name](account, tables) if name in _ADVICE else ""


def _of_import(account: Account, tables: Tables) -> str:
    image = tables.get("image", {})
    is_here = not image or image.keys() & {"sha256", "store_id", "size_bytes"}
    if is_here or tables.get("environment", {}).get("engine") == "host":
        return ""
    return "import the image before the launch: runner import"


def _of_preflight(account: Account, tables: Tables) -> str:
    return "skip the checks of the nodes: launch --no-preflight"


def _of_start(account: Account, tables: Tables) -> str:
    return "shorten `setup` in the job file" if account.setup_share > 0.5 else ""


def _of_loading(account: Account, tables: Tables) -> str:
    variables = {**tables.get("environment.env", {}), **tables.get("job.env", {})}
    is_offline = str(variables.get(hub.OFFLINE, "")).lower() in hub.TRUE
    is_missing = hub.NOT_HERE in tables.get("revisions", {}).values()
    return (
        ""
        if is_offline or not is_missing
        else "download models and data before the launch: runner prefetch"
    )


def _of_saves(account: Account, tables: Tables, change: str) -> str:
    if tables.get("job.env", {}).get("RUNNER_SAVE_EVERY") == "auto":
        return ""
    of_trainer = "the option of your trainer"
    return f"{change}: " + (
        of_trainer if _is_own_script(tables) else f'save_every = "auto", or {of_trainer}'
    )


def _of_repeated(account: Account, tables: Tables) -> str:
    return _of_saves(account, tables, "save more often")


def _of_saving(account: Account, tables: Tables) -> str:
    """The save of the final model cannot be left out."""
    while_training = any(each.before.get("saving") for each in account.attempts)
    return _of_saves(account, tables, "save less often") if while_training else ""


def _of_evaluation(account: Account, tables: Tables) -> str:
    while_training = any(each.before.get("evaluation") for each in account.attempts)
    return "evaluate less often" if while_training else ""


def _of_hang(account: Account, tables: Tables) -> str:
    seconds = tables.get("job", {}).get("hang_seconds")
    if not seconds or not _longest(account, "hang").text("hang").startswith(_NOTICED):
        return ""
    place = "launch --hang-seconds" if _is_own_script(tables) else "hang_seconds in the job file"
    return f"detect it earlier: {place} (it was {seconds})"


def _of_spare(account: Account, tables: Tables) -> str:
    asked = tables.get("job.resources", {}).get("spare_nodes")
    return (
        f"ask for fewer spare nodes: spare_nodes in [resources] (it was {asked})" if asked else ""
    )


def _of_restart_gap(account: Account, tables: Tables) -> str:
    attempt = _longest(account, "restart_gap")
    rung = attempt.rung.name if attempt.rung else ""
    if attempt.cause not in (_MACHINE, *_PROGRAM):
        return ""
    if rung in _WITHOUT_SCHEDULER or not rung:
        return "see why the attempts failed: runner why"
    if _is_own_script(tables):
        return "see why the attempts failed: runner why"
    if attempt.cause == _MACHINE and not tables.get("job.resources", {}).get("spare_nodes"):
        return "keep the allocation if a node fails: spare_nodes in [resources]"
    if tables.get("job.restart", {}).get("in_place") is not True:
        return "restart in the same allocation: in_place = true in [restart]"
    return "see why the attempts failed: runner why"


def _of_unknown(account: Account, tables: Tables) -> str:
    return "" if account.tells else f"let your program write its times ({page('account')})"


def _of_queue(account: Account, tables: Tables) -> str:
    waited_for = account.run.after or account.run.sweep
    return "" if waited_for else "ask for less time or fewer nodes, or for another partition"


def _is_own_script(tables: Tables) -> bool:
    return bool(tables.get("job", {}).get("batch"))


def _longest(account: Account, name: str) -> Attempt:
    """The attempt after which most time of a class was lost."""
    longest = max(account.attempts, key=lambda each: each.after.get(name, 0.0))
    return Attempt(account.run.folder / "attempts" / str(longest.number))


_ADVICE: Mapping[str, Callable[[Account, Tables], str]] = {
    "import": _of_import,
    "preflight": _of_preflight,
    "start": _of_start,
    "loading": _of_loading,
    "repeated": _of_repeated,
    "saving": _of_saving,
    "evaluation": _of_evaluation,
    "hang": _of_hang,
    "spare": _of_spare,
    "restart_gap": _of_restart_gap,
    "unknown": _of_unknown,
    "queue": _of_queue,
}
