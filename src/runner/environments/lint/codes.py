"""Every lint code: severity, meaning, fix. `runner env check --list` prints them."""

from dataclasses import dataclass

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Code:
    """What a code means."""

    severities: tuple[str, ...]
    """the usual one first"""
    title: str
    fix: str


_ERROR, _WARNING, _NOTE = ("error",), ("warning",), ("note",)

_FILE = {
    "file-unreadable": Code(
        _ERROR, "the file cannot be opened, or is not UTF-8", "check the path, mode and encoding of the file"
    ),
    "toml-syntax": Code(_ERROR, "the file is not valid TOML", "fix the line of the finding"),
    "table-twice": Code(_ERROR, "a [table] heading occurs twice", "put all keys of the table under a single heading"),
    "key-twice": Code(_ERROR, "a key is set twice", "keep only one of the two values"),
    "key-after-table": Code(
        ("error", "warning"),
        "a top-level key is below a [table] heading, so TOML makes it part of that table",
        "move the key above the first [table]",
    ),
    "unknown-key": Code(
        ("error", "warning"),
        "EDFs have no key of this name; this is only a warning with Sarus Suite, which ignores the key",
        "correct the key, or remove it",
    ),
    "wrong-type": Code(_ERROR, "a value has the wrong type", "write a value of the type that docs/env.md lists"),
    "env-not-text": Code(_ERROR, "a value in [env] is not text", 'write the value in quotes: NAME = "1"'),
    "env-name": Code(
        _ERROR, "a name in [env] is not a valid variable name", "use letters, digits and _; do not begin with a digit"
    ),
    "annotation-not-text": Code(
        ("error", "warning"),
        "a value in [annotations] is not text; this is only a warning with Sarus Suite, which converts values",
        'write the value in quotes: "true"',
    ),
    "nul-byte": Code(_ERROR, "a value contains a NUL byte", "remove the byte; binary data belongs in a mounted file"),
    "base-missing": Code(
        _ERROR, "the EDF that base_environment names does not exist", "correct the name, or give a path: ./FILE.toml"
    ),
    "base-circle": Code(
        _ERROR,
        "a file is its own base_environment, directly or through other files",
        "remove base_environment from one of the files",
    ),
    "base-too-deep": Code(_ERROR, "base_environment is nested more than ten levels deep", "merge some of the files"),
    "cannot-load": Code(
        _ERROR, "the environment cannot be read, for a reason without its own code", "correct what the finding names"
    ),
}

_VARIABLES = {
    "broken-reference": Code(_ERROR, "a `${` has no `}`, or no name after it", "write ${NAME} or ${NAME:-default}"),
    "undefined-variable": Code(
        ("error", "warning", "note"),
        "`${NAME}` is not defined; this is a warning in [env], because the image can define the variable, "
        "and a note if this machine does not belong to the site",
        "export the variable, or write a default: ${NAME:-…}",
    ),
    "variable-without-braces": Code(
        ("error", "warning"),
        "`$NAME` is plain text, not a variable; this is a warning in [env] and [annotations]",
        "write ${NAME}",
    ),
    "variable-in-image": Code(_ERROR, "Sarus Suite does not expand variables in `image`", "write the full name"),
    "env-refers-to-env": Code(
        _WARNING,
        "an entry of [env] refers to another entry of [env], but entries cannot see each other",
        "write the value itself in both entries",
    ),
    "placeholder": Code(
        _ERROR,
        "a value contains a placeholder: `{{name}}`, `{name}`, `<name>`",
        "replace the placeholder with the value",
    ),
}

_IMAGE = {
    "image-empty": Code(_ERROR, "the EDF does not set an image, and the engine needs one", 'set image = "…"'),
    "image-missing": Code(
        _ERROR, "the squashfs file does not exist", "correct the path, or build and import the image"
    ),
    "image-not-squashfs": Code(_ERROR, "the file is not a squashfs file, or is truncated", "import the image again"),
    "image-architecture": Code(
        _ERROR,
        "the image is not for the processors or GPUs of the site's nodes",
        "build the image for the site's nodes",
    ),
    "image-name": Code(
        _ERROR,
        "the image's name contains characters that registries do not accept",
        "use lowercase letters, digits and . _ - /",
    ),
    "image-scheme": Code(_ERROR, "the image begins with `docker://`", "remove `docker://`"),
    "image-no-tag": Code(
        _NOTE, "the tag is missing or is `latest`, so the image can change", "use a tag with a version"
    ),
    "image-digest": Code(
        _ERROR, "enroot before 4.0 cannot pull an image by digest", "use a tag, or use `runner import`"
    ),
    "relative-squashfs": Code(
        _ERROR, "`x.sqsh` without a slash means an image in a registry", "write an absolute path, or ./x.sqsh"
    ),
    "slash-after-registry": Code(
        ("error", "warning"),
        "enroot before 4.0 looks for `nvcr.io/…` on Docker Hub; this is a warning if enroot's version is unknown",
        "write REGISTRY#IMAGE",
    ),
    "hash-after-registry": Code(
        _ERROR, "Sarus Suite, podman and docker do not accept `#` after the registry", "write REGISTRY/IMAGE"
    ),
    "credentials-missing": Code(
        ("warning", "note"),
        "there is no login for the registry; this is a note if the registry's images are usually public",
        "add a line for the registry to the credentials file",
    ),
    "credentials-half": Code(
        _WARNING,
        "only one of nvcr.io and authn.nvidia.com has a login; a pull needs both logins",
        "copy the existing line; in the copy, put the other host after `machine`",
    ),
}

_MOUNTS = {
    "mount-syntax": Code(
        ("error", "warning"),
        "the mount is not SOURCE:TARGET[:FLAGS]; with Sarus Suite, a relative target is only a warning",
        "write, for example, '${SCRATCH}/data:/data:ro'",
    ),
    "mount-without-target": Code(
        ("note", "error"),
        "the mount has no target, so the source's path is the target; this is an error with Sarus Suite",
        "write SOURCE:TARGET",
    ),
    "mount-flag-separator": Code(
        _ERROR,
        "the flags are joined with the wrong character: ce and pyxis need `+`, Sarus Suite needs `,`",
        "join the flags with the character that the engine needs",
    ),
    "mount-flag-unknown": Code(_ERROR, "the engine does not have this mount flag", "correct the flag, or remove it"),
    "mount-separator": Code(
        _ERROR,
        "a path contains a comma, colon or space, so the engine cannot mount it",
        "create a symlink with a simple path, and mount the symlink",
    ),
    "mount-source-missing": Code(
        ("warning", "error"),
        "the source does not exist on this machine; this is an error if the job runs here",
        "correct the path, or create the source",
    ),
    "mount-relative": Code(
        _NOTE,
        "the source is relative to the folder where you run srun, not to the folder of the EDF",
        "write an absolute path",
    ),
    "mount-target-twice": Code(_ERROR, "two mounts have the same target", "keep one of the two mounts"),
    "mount-hides-image": Code(
        _ERROR, "the mount hides a folder with programs of the image", "choose a target below that folder"
    ),
    "mount-all-homes": Code(_WARNING, "the home folders of all users are mounted", "mount ${HOME}, or a folder in it"),
    "home-shadows-image": Code(
        _WARNING, "packages in the mounted ~/.local hide the image's packages", 'set PYTHONNOUSERSITE = "1" in [env]'
    ),
    "read-only-folder": Code(
        _WARNING,
        "the working directory or a cache folder is read-only",
        "mount the folder without `ro`, or use a writable folder",
    ),
}

_ENV = {
    "secret-value": Code(
        _ERROR,
        "a value contains a token or password in plain text",
        "remove the value, and export the variable in the shell where you launch",
    ),
    "path-replaced": Code(
        _WARNING,
        "PATH or LD_LIBRARY_PATH is set without the image's value",
        'keep the image\'s value: PATH = "/mine:${PATH}"',
    ),
    "path-lost": Code(
        _WARNING, "a login shell resets PATH, and [env] does not set PATH", "use bash -c, or set PATH in [env]"
    ),
    "gpus-hidden": Code(_WARNING, "a variable in [env] hides GPUs", "remove the variable"),
    "stale-tuning": Code(
        _WARNING,
        "an NCCL_* or FI_* variable in [env] overrides the value that the network hook sets",
        "remove the variable, and measure the speed again",
    ),
    "nccl-over-tcp": Code(
        _WARNING,
        "no plugin connects NCCL to the fast network, so NCCL uses TCP",
        'set com.hooks.aws_ofi_nccl.enabled = "true"',
    ),
}

_HOOKS = {
    "annotation-unknown": Code(_WARNING, "no hook reads this annotation", "correct the name of the annotation"),
    "annotation-value": Code(_ERROR, "the hook does not accept this value", "use a value that the finding names"),
    "hook-variant": Code(
        _ERROR,
        "the variant of aws_ofi_nccl does not match the CUDA version of the image",
        "use the variant for the image's CUDA version",
    ),
    "hook-variant-ignored": Code(
        _NOTE, "the variant of aws_ofi_nccl has no effect if `netstack.source` is `artifact`", "remove the variant"
    ),
    "hook-conflict": Code(
        _WARNING,
        "the hook aws_ofi_nccl is on and needs the hook cxi, but cxi is off",
        "remove the annotation that turns cxi off, or the annotation that turns aws_ofi_nccl on",
    ),
    "hook-needs-writable": Code(_ERROR, "the hooks for ssh and MPS need writable = true", "set writable = true"),
    "ssh-key": Code(
        _ERROR,
        "authorize_ssh_key is not the absolute path of a public key file",
        "write the absolute path of the .pub file",
    ),
    "rank-remap": Code(
        _WARNING,
        "this annotation makes pyxis set RANK and LOCAL_RANK, but torchrun must set them",
        "remove the annotation",
    ),
    "extended-image-hook": Code(
        _ERROR,
        "an Alps extended image has its own NCCL plugin, and the hook aws_ofi_nccl replaces it",
        "turn off the hook aws_ofi_nccl",
    ),
    "extended-image-entrypoint": Code(
        _ERROR,
        "an Alps extended image sets its variables in its entrypoint, but the entrypoint does not run",
        "set entrypoint = true",
    ),
    "extended-image-cxi": Code(
        _ERROR, "with an Alps extended image, the hook cxi must be off", 'set com.hooks.cxi.enabled = "false"'
    ),
    "extended-image-pmix": Code(
        _WARNING, "an Alps extended image needs PMIX_MCA_psec", 'set PMIX_MCA_psec = "native" in [env]'
    ),
    "engine-refuses": Code(_ERROR, "the engine does not support a setting", "remove the setting in the finding"),
}

_SCRIPT = {
    "environment-missing": Code(
        _ERROR, "the script names an environment that does not exist", "correct the name in the script"
    ),
    "sbatch-environment": Code(
        _WARNING, "`#SBATCH --environment` runs the whole script in the container", "use srun --environment=…"
    ),
    "sbatch-variable": Code(
        _ERROR,
        "a `$` in an `#SBATCH` line is plain text, because sbatch does not expand variables",
        "write the value, or pass the flag on the command line of sbatch",
    ),
    "sbatch-hash": Code(_ERROR, "a `#` in an `#SBATCH` line starts a comment", r"write \#"),
    "sbatch-late": Code(
        _ERROR, "sbatch ignores an `#SBATCH` line after the first command", "move the line above the first command"
    ),
    "sbatch-refused": Code(_ERROR, "the site's Slurm rejects this flag", "change or remove the flag"),
    "account-missing": Code(
        _WARNING, "the site requires an account, and the script does not set one", "add #SBATCH --account=…"
    ),
    "node-rank-too-early": Code(
        _ERROR,
        "the shell expands this variable once, on the first node, so all nodes get the rank of the first node",
        "write srun bash -c '… $SLURM_NODEID …'",
    ),
    "rank-remap-torchrun": Code(
        _WARNING, "pyxis sets RANK and LOCAL_RANK before torchrun starts", "write env -u RANK -u LOCAL_RANK torchrun …"
    ),
    "gpus-per-task": Code(
        _WARNING,
        "each task sees only its own GPU, so NCCL cannot reach the other GPUs of the node",
        "use --gpus-per-node",
    ),
    "cpus-not-inherited": Code(
        _WARNING,
        "in some versions of Slurm, srun does not inherit `--cpus-per-task` from the job",
        "use srun --cpus-per-task=…",
    ),
    "master-address": Code(
        _WARNING, "MASTER_ADDR is set to the wrong node, or to several addresses", "use scontrol show hostnames"
    ),
    "fixed-port": Code(
        _WARNING,
        "MASTER_PORT is a fixed number, so two jobs on one node would use the same port",
        "derive the port from SLURM_JOB_ID",
    ),
    "trace-prints-secrets": Code(
        _WARNING, "`set -x` prints secrets to the log", "use set +x before lines that handle secrets"
    ),
}

CODES: dict[str, Code] = {**_FILE, **_VARIABLES, **_IMAGE, **_MOUNTS, **_ENV, **_HOOKS, **_SCRIPT}
