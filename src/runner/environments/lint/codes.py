"""Every code of the linter: how grave it is, what it means, what mends it. docs/lint.md has the same table."""

from __future__ import annotations

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
    "file-unreadable": Code(_ERROR, "the file cannot be opened, or is no UTF-8 text", "check its path, mode, encoding"),
    "toml-syntax": Code(_ERROR, "the file is not TOML", "mend that line"),
    "table-twice": Code(_ERROR, "a table is opened twice", "put all its keys under one [table] heading"),
    "key-twice": Code(_ERROR, "a key is set twice", "keep one of the two"),
    "key-after-table": Code(
        ("error", "warning"),
        "a key of the file stands below a [table], and belongs to that table",
        "move it up, above the first [table]",
    ),
    "unknown-key": Code(_ERROR, "a key that EDFs do not have, or a misspelt one", "correct its name, or remove it"),
    "wrong-type": Code(_ERROR, "a value of another type than its key has", "see the keys in docs/environment.md"),
    "env-not-text": Code(_ERROR, "a value in [env] is not text", 'write it in quotes: NAME = "1"'),
    "env-name": Code(_ERROR, "a name in [env] that no variable can have", "letters, digits and _, no digit first"),
    "annotation-not-text": Code(_ERROR, "a value in [annotations] is not text", 'write it in quotes: "true"'),
    "nul-byte": Code(_ERROR, "a value holds a NUL byte", "remove it; binary data belongs in a mounted file"),
    "base-missing": Code(_ERROR, "a base_environment is not found", "correct its name, or give a ./path"),
    "base-circle": Code(_ERROR, "the base_environment goes round in a circle", "cut it at one of the files"),
    "base-too-deep": Code(_ERROR, "base_environment is nested deeper than ten levels", "merge some of the files"),
    "cannot-load": Code(_ERROR, "the environment cannot be read for another reason", "see the reason"),
}

_VARIABLES = {
    "broken-reference": Code(
        _ERROR, "a `${` that is not closed, or no name in it", "write ${NAME} or ${NAME:-default}"
    ),
    "undefined-variable": Code(
        ("error", "warning", "note"),
        "`${NAME}` is not defined here; in [env] a warning, the image may define it; a note away from the site",
        "export it, or give it a default: ${NAME:-…}",
    ),
    "variable-without-braces": Code(
        ("error", "warning"), "`$NAME` stays plain text; in [env] and [annotations] a warning", "write ${NAME}"
    ),
    "variable-in-image": Code(_ERROR, "Sarus Suite expands no variables in `image`", "write the name out"),
    "env-refers-to-env": Code(
        _WARNING, "a value in [env] refers to another entry of [env], which it does not see", "write the value out"
    ),
    "placeholder": Code(_ERROR, "`{{name}}` or `{name}` of a template is still there", "put the value in"),
}

_IMAGE = {
    "image-empty": Code(_ERROR, "no image, and the engine needs one", 'image = "…"'),
    "image-missing": Code(_ERROR, "the squashfs file is not there", "correct the path, or build and import it"),
    "image-not-squashfs": Code(_ERROR, "the file is no squashfs, or is cut off", "import it again"),
    "image-architecture": Code(
        _ERROR, "the image is for another processor than the site's nodes", "build it for theirs"
    ),
    "image-name": Code(
        _ERROR, "capital letters or signs that no registry takes", "small letters, digits and . _ - / only"
    ),
    "image-scheme": Code(_ERROR, "`docker://` in front of the image", "leave the scheme out"),
    "image-no-tag": Code(_NOTE, "no tag, or `latest`: it is another image tomorrow", "name a version"),
    "image-digest": Code(_ERROR, "enroot before 4.0 cannot pull by digest", "name a tag, or import it with runner"),
    "relative-squashfs": Code(_ERROR, "`x.sqsh` is taken for an image in a registry", "an absolute path, or ./x.sqsh"),
    "slash-after-registry": Code(
        ("error", "warning"),
        "`nvcr.io/…` is taken for a name on Docker Hub by enroot before 4.0; a warning where its version is not known",
        "write REGISTRY#IMAGE",
    ),
    "hash-after-registry": Code(
        _ERROR, "Sarus Suite and podman know no `#` after the registry", "write REGISTRY/IMAGE"
    ),
    "credentials-missing": Code(
        ("warning", "note"),
        "no login for the registry; a note where images are usually public",
        "add a line to the file",
    ),
    "credentials-half": Code(
        _WARNING,
        "a login for nvcr.io or authn.nvidia.com alone: the pull needs both",
        "add the same line for the other",
    ),
}

_MOUNTS = {
    "mount-syntax": Code(_ERROR, "not SOURCE:TARGET[:FLAGS]", "'${SCRATCH}/data:/data:ro'"),
    "mount-without-target": Code(
        ("note", "error"), "no target: the source's path is used; an error for Sarus Suite", "write SOURCE:TARGET"
    ),
    "mount-flag-separator": Code(
        _ERROR, "flags joined by the other engine's sign: `+` for ce and pyxis, `,` for Sarus Suite", "join them right"
    ),
    "mount-flag-unknown": Code(_ERROR, "a flag that the engine's mounts do not have", "correct it, or leave it out"),
    "mount-separator": Code(
        _ERROR, "a comma, colon or blank that the engine's mounts cannot hold", "rename or link the folder"
    ),
    "mount-source-missing": Code(
        ("warning", "error"),
        "the source is not on this node; an error where the job runs here",
        "correct the path, or make it",
    ),
    "mount-relative": Code(_NOTE, "a relative source begins where srun is called, not at the file", "an absolute path"),
    "mount-target-twice": Code(_ERROR, "two mounts have the same target", "keep one of them"),
    "mount-hides-image": Code(_ERROR, "the target is a folder of the image's own programs", "mount a folder below it"),
    "mount-all-homes": Code(_WARNING, "all home folders are mounted", "mount ${HOME}, or a folder in it"),
    "home-shadows-image": Code(
        _WARNING, "the home folder is mounted: ~/.local shadows the image's packages", 'PYTHONNOUSERSITE = "1" in [env]'
    ),
    "read-only-folder": Code(
        _WARNING, "the working directory or a cache is where nothing can be written", "mount it writable, or move it"
    ),
}

_ENV = {
    "secret-value": Code(_ERROR, "a token or password as plain text", "export it where you launch"),
    "path-replaced": Code(
        _WARNING, "PATH or LD_LIBRARY_PATH is set without what the image has in it", 'PATH = "/mine:${PATH}"'
    ),
    "path-lost": Code(
        _WARNING, "a login shell resets PATH, and [env] does not keep the image's", "bash -c, or set PATH in [env]"
    ),
    "gpus-hidden": Code(_WARNING, "a variable in [env] hides GPUs", "remove it"),
    "stale-tuning": Code(
        _WARNING, "an NCCL_* or FI_* entry overrides what the network hook sets", "remove it, and measure"
    ),
    "nccl-over-tcp": Code(
        _WARNING, "nothing brings NCCL to the fast network: it will use TCP", 'com.hooks.aws_ofi_nccl.enabled = "true"'
    ),
}

_HOOKS = {
    "annotation-unknown": Code(_WARNING, "an annotation that no hook reads", "correct its name"),
    "annotation-value": Code(_ERROR, "a value that the hook does not know", "see the reason"),
    "hook-variant": Code(_ERROR, "the plugin's variant does not fit the image's CUDA", "name the variant of its CUDA"),
    "hook-variant-ignored": Code(_NOTE, "the variant counts for nothing with the artifact network stack", "remove it"),
    "hook-conflict": Code(_WARNING, "cxi is switched off and aws_ofi_nccl on, which switches it on", "remove one"),
    "hook-needs-writable": Code(_ERROR, "ssh and MPS need writable = true", "writable = true"),
    "ssh-key": Code(_ERROR, "authorize_ssh_key is not the absolute path of a public key file", "write its path"),
    "rank-remap": Code(
        _WARNING, "RANK and LOCAL_RANK are set by pyxis, and torchrun is to set them", "take the annotation out"
    ),
    "extended-image-hook": Code(
        _ERROR, "an Alps extended image brings its network stack, and the hook brings another", "switch the hook off"
    ),
    "extended-image-entrypoint": Code(
        _ERROR, "an Alps extended image gets its variables by its entrypoint", "entrypoint = true"
    ),
    "extended-image-cxi": Code(
        _ERROR, "an Alps extended image needs the cxi hook off", 'com.hooks.cxi.enabled = "false"'
    ),
    "extended-image-pmix": Code(
        _WARNING, "an Alps extended image needs PMIX_MCA_psec", 'PMIX_MCA_psec = "native" in [env]'
    ),
    "engine-refuses": Code(_ERROR, "the engine cannot express a field", "see the reason"),
}

_SCRIPT = {
    "environment-missing": Code(_ERROR, "the environment that the script names is not found", "correct its name"),
    "sbatch-environment": Code(
        _WARNING, "`#SBATCH --environment` puts the whole script in the container", "srun --environment=…"
    ),
    "sbatch-variable": Code(
        _ERROR, "a `$` in an `#SBATCH` line stays plain text", "write the value, or an sbatch flag"
    ),
    "sbatch-hash": Code(_ERROR, "an `#` in an `#SBATCH` line begins a comment", r"write \#"),
    "sbatch-late": Code(_ERROR, "an `#SBATCH` line after the first command counts for nothing", "move it up"),
    "sbatch-refused": Code(_ERROR, "a flag that the site's Slurm refuses", "see the reason"),
    "account-missing": Code(_WARNING, "the site wants an account, and the script names none", "#SBATCH --account=…"),
    "node-rank-too-early": Code(
        _ERROR,
        "the batch script puts the node's rank in: it is the same on every node",
        "srun bash -c '… $SLURM_NODEID …'",
    ),
    "rank-remap-torchrun": Code(
        _WARNING, "pyxis sets RANK and LOCAL_RANK in front of torchrun", "env -u RANK -u LOCAL_RANK torchrun …"
    ),
    "gpus-per-task": Code(_WARNING, "each task sees its own GPU only, so NCCL finds no peers", "--gpus-per-node"),
    "cpus-not-inherited": Code(
        _WARNING, "`--cpus-per-task` of the job does not reach srun in all versions of Slurm", "srun --cpus-per-task=…"
    ),
    "master-address": Code(
        _WARNING, "MASTER_ADDR is taken from the wrong node, or is several addresses", "scontrol show hostnames"
    ),
    "fixed-port": Code(_WARNING, "two jobs on one node want the same MASTER_PORT", "derive it from SLURM_JOB_ID"),
    "trace-prints-secrets": Code(_WARNING, "`set -x` prints secrets into the log", "set +x around them"),
}

CODES: dict[str, Code] = {**_FILE, **_VARIABLES, **_IMAGE, **_MOUNTS, **_ENV, **_HOOKS, **_SCRIPT}
