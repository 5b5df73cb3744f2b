"""[budget] holds for whoever types: a script that launches in a loop stops at it, with --yes too."""

from tests.end_to_end.conftest import Runner, write

SLEEP = ("--env", "none", "--engine", "host", "--", "sleep", "600")


def limited(local: Runner, text: str) -> Runner:
    write(local.project, {"runner.toml": f"[budget]\n{text}\n", "edf/none.toml": ""})
    return local


def test_a_loop_of_launches_stops_at_the_jobs_at_once(local: Runner) -> None:
    limited(local, "jobs_at_once = 2")
    codes = [local("launch", "--yes", *SLEEP, code=None).returncode for _ in range(5)]
    assert codes == [0, 0, 1, 1, 1] and len(local.made()) == 2
    refused = local("launch", "--yes", *SLEEP, code=1)
    assert "this launch starts 1 job" in refused.stderr
    assert "budget: 2 of 2 jobs at once; --yes does not override a budget" in refused.stderr
    assert "budget: 2 of 2 jobs at once" in local("status").stderr
    assert "this launch starts 1 job" in local("rerun", local.made()[0].name, code=1).stderr
    assert len(local.made()) == 2
    local("cancel", local.made()[0].name)
    local("launch", *SLEEP)
    for run in local.made():
        local("cancel", run.name)


def test_the_gpu_hours_of_a_day_count_what_runs_may_still_use(local: Runner) -> None:
    limited(local, "gpu_hours_per_day = 10")
    gpus = ("--gpus-per-node", "4", "--time", "120")
    first = local("launch", *gpus, *SLEEP).stdout.strip()
    refused = local("launch", "--yes", *gpus, *SLEEP, code=1)
    assert "this launch may use 8.0 GPU hours, and 2.0 are left" in refused.stderr
    assert "gpu_hours in [restart]" not in refused.stderr  # no limit of it shortens an attempt
    assert "budget: 8.0 of 10 GPU hours in 24 hours" in local("status").stderr
    sweep = ("--sweep", "N=1,2,3", "--gpus-per-node", "1", "--time", "60")
    assert "this launch may use 3.0 GPU hours" in local("launch", "--yes", *sweep, *SLEEP, code=1).stderr
    local("cancel", first)
    second = local("launch", *gpus, *SLEEP).stdout.strip()  # what the first one has not used is free again
    local("cancel", second)
    local("launch", "--env", "none", "--engine", "host", "--wait", "--", "true")  # no GPU: the budget does not count it


def test_a_misspelt_budget_is_refused(local: Runner) -> None:
    limited(local, "gpu_hours = 10")
    assert "gpu_hours" in local("launch", *SLEEP, code=1).stderr
    limited(local, "jobs_at_once = -1")
    assert "jobs_at_once is -1" in local("launch", *SLEEP, code=1).stderr
    assert not local.made()
