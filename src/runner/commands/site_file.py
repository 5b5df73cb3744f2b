"""The site file that `runner init --site NAME` writes: what was said and seen, the rest as comments to fill in."""

from __future__ import annotations

from collections.abc import Mapping

from runner.detection import cluster_name, find_site
from runner.environments.environment import quoted
from runner.machine import process
from runner.site_files import load_site, site_names


def site_file(
    name: str, account: str | None, partition: str | None, environ: Mapping[str, str]
) -> tuple[str, tuple[str, ...]]:
    """(the file's text, what is still to be answered)."""
    known = name in site_names(environ)
    base = load_site(name, environ) if known else find_site("generic-slurm", environ)[0]
    found, _ = find_site(None, environ)
    if not known and found.scheduler == "slurm":
        base = found
    cluster = cluster_name(environ) if process.which("scontrol") else None
    lines = [f"# My values for the site {name}; they win over those that come with runner (runner site show {name})."]
    if not known:
        lines += [f"name = {quoted(name)}", 'summary = "…"', f"base = {quoted(base.name)}"]
        if cluster:
            lines += ["", "[detect]", f"clusters = [{quoted(cluster)}]"]
    values = {"account": account, "partition": partition}
    hints = {
        "account": "the project that pays: sbatch --account",
        "partition": "sbatch --partition; see sinfo",
        "gpus_per_node": "a number; see sinfo -o %G",
        "cpus_per_node": "a number; see sinfo -o %c",
        "memory": '"450G", to ask for per node',
        "architecture": '"amd64" or "arm64": the processors of the compute nodes',
    }
    lines += ["", "[values]"]
    questions = []
    for key, hint in hints.items():
        value = values.get(key)
        if value is not None:
            lines.append(f"{key} = {quoted(value)}")
        elif getattr(base, key) is None:
            lines.append(f"# {key} = …    # {hint}")
            if key == "account" and base.account_required:
                questions.append(f"{name} wants an account: --account NAME, or fill it in")
    lines.append(f"# image_folder = {quoted(base.image_folder)}")
    return "\n".join(lines) + "\n", tuple(questions)
