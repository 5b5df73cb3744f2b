"""Which variables of the host, the image and the EDF a container sees. Source: pyxis 0.24, enroot 4.1."""

from collections.abc import Mapping

# Never handed to the container's start; the per-task ones come from Slurm afterwards.
NOT_HANDED = frozenset(
    (
        "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID", "PMIX_RANK",
        "PMI_FD", "SLURMD_NODENAME", "ENROOT_LIBRARY_PATH", "ENROOT_SYSCONF_PATH", "ENROOT_RUNTIME_PATH",
        "ENROOT_CACHE_PATH", "ENROOT_DATA_PATH", "ENROOT_TEMP_PATH", "ENROOT_ZSTD_OPTIONS", "ENROOT_TRANSFER_RETRIES",
        "ENROOT_CONNECT_TIMEOUT", "ENROOT_MAX_CONNECTIONS", "ENROOT_ALLOW_HTTP",
    )
)  # fmt: skip
PER_TASK = frozenset(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID", "PMIX_RANK", "PMI_FD"))
LANGUAGE = frozenset(("LANG", "LANGUAGE", "LC_ALL"))
PREFIX = "RUNNER_LAB_"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def image_variables(text: str, host: Mapping[str, str]) -> dict[str, str]:
    """The variables of an image's /etc/environment as enroot reads them: `VAR=VALUE` lines, raw, surrounding
    quotes stripped, ENROOT_* and malformed lines dropped, `${HOSTVAR}` filled in."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if not equals or not name.isidentifier() or name.startswith("ENROOT_"):
            continue
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        for key in _references(value):
            value = value.replace(f"${{{key}}}", host.get(key, ""))
        found[name] = value
    return found


def _references(value: str) -> list[str]:
    pieces = value.split("${")[1:]
    return [name for name in (piece.partition("}")[0] for piece in pieces) if name.isidentifier()]


def start_environment(host: Mapping[str, str], image: Mapping[str, str], keep: frozenset[str]) -> dict[str, str]:
    """What the container's first program sees: the job's variables under the image's, save for `keep`."""
    dropped = NOT_HANDED | (LANGUAGE - keep)
    merged = {name: value for name, value in host.items() if name not in dropped and not name.startswith(PREFIX)}
    merged["PATH"] = DEFAULT_PATH
    merged.update(image)
    merged.update({name: host[name] for name in keep if name in host})
    return merged


def task_environment(
    task: Mapping[str, str], container: Mapping[str, str], edf: Mapping[str, str], remap_torch: bool
) -> dict[str, str]:
    """What a task's command sees: the job's variables, the container's over them, and the EDF's over all. What is not
    handed to the container's start, such as LD_LIBRARY_PATH, is still the job's. Seen with pyxis 0.24.0."""
    dropped = LANGUAGE | {"PATH"}  # the container always has one
    merged = {name: value for name, value in task.items() if name not in dropped and not name.startswith(PREFIX)}
    merged.update(container)
    if remap_torch and "PYTORCH_VERSION" in merged:
        merged["RANK"] = merged.get("SLURM_PROCID", "0")
        merged["LOCAL_RANK"] = merged.get("SLURM_LOCALID", "0")
    for name, value in edf.items():
        merged.pop(name, None) if value == "" else merged.update({name: value})
    return merged
