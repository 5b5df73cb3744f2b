#!/usr/bin/env python3
"""A stand-in for Sarus Suite's `sarusctl`, which no package registry has. It records every call.

It follows the user guide of CSCS (container-engine/sarus-suite/user-guide.md, 2026-08-20) for commands and output, and
sarus-suite/parallax@17b46be for the files of the store and for what it does when an image is there already. It is not
Sarus Suite: nothing here shows that the real programs behave like this. Podman below it is the real one,
with the lab's storage.

LAB_SARUS names a folder: `store/` is the store, `calls` has one line per call, and `fail` says how the next migration
fails: `full` (no space left), `middle` (killed between the list and the squashfs file), `silent` (the same, exit 0).
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(os.environ["LAB_SARUS"])
STORE = HERE / "store"
LIST = STORE / "overlay-images/images.json"
VALIDATED = {"image": str, "workdir": str, "mounts": list, "devices": list, "env": dict, "annotations": dict}


def podman(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    if "CONTAINERS_STORAGE_CONF" not in os.environ:  # a test without the lab's podman: the user's own images are none
        return subprocess.CompletedProcess(words, 125, "", "the test has no podman of the lab")
    return subprocess.run(("podman", *words), capture_output=True, text=True, check=check)


def listed() -> list[dict[str, object]]:
    return json.loads(LIST.read_text()) if LIST.exists() else []


def save(images: list[dict[str, object]]) -> None:
    LIST.parent.mkdir(parents=True, exist_ok=True)
    LIST.write_text(json.dumps(images))


def full_name(name: str) -> str:
    """podman's complete name of a short one."""
    first, slash, _ = name.partition("/")
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    if slash and ("." in first or ":" in first or first == "localhost"):
        return tagged
    return f"docker.io/{tagged}" if slash else f"docker.io/library/{tagged}"


def find(name: str) -> dict[str, object] | None:
    return next((one for one in listed() if full_name(name) in one["names"]), None)


def squash(image: dict[str, object]) -> Path:
    link = (STORE / "overlay" / str(image["layer"]) / "link").read_text()
    return STORE / "squash" / f"{link}.squash"


def add(name: str, source_id: str, created: str, data: bytes | None, tree: str = "") -> None:
    """Put an image into the store: what `parallax --migrate` leaves there. No `data` and no `tree`: half of it."""
    new = hashlib.sha256(f"flat {source_id}".encode()).hexdigest()
    layer = hashlib.sha256(f"layer {name} {source_id}".encode()).hexdigest()
    link = layer[:26].upper()
    folder = STORE / "overlay" / layer
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "link").write_text(link)
    target = STORE / "squash" / f"{link}.squash"
    target.parent.mkdir(parents=True, exist_ok=True)
    if data is not None:
        target.write_bytes(data)
    elif tree:
        # as in a real store: the files of an ordinary user's image are root's in its namespace
        made = ("mksquashfs", tree, str(target), "-noappend", "-no-progress", "-quiet", "-all-root")
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    names = list(dict.fromkeys((full_name(name), name)))
    save([*listed(), {"id": new, "layer": layer, "names": names, "created": created}])


def images() -> int:
    rows = []
    shown = podman("images", "--format={{.Repository}}\t{{.Tag}}\t{{.ID}}\t{{.CreatedSince}}\t{{.Size}}", check=False)
    rows += [(*line.split("\t"), "false") for line in shown.stdout.splitlines()]
    for image in listed():
        for name in image["names"]:  # type: ignore[attr-defined]
            repository, _, tag = name.rpartition(":")
            rows.append((repository, tag, str(image["id"])[:12], str(image["created"]), "3.49 kB", "true"))
    columns = ["REPOSITORY", "TAG", "IMAGE ID", "CREATED", "SIZE", "R/O"]
    if not any(row[5] == "true" for row in rows):  # podman shows the column only where it says something
        columns, rows = columns[:5], [row[:5] for row in rows]
    widths = [max(len(row[i]) for row in (columns, *rows)) + 2 for i in range(len(columns))]
    for row in (columns, *rows):
        print("".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def pull(name: str) -> int:
    print(f"Pulling {name} with Podman...", flush=True)
    if (done := podman("pull", name, check=False)).returncode:
        print(f"Failed to pull image {name}: {done.stderr.strip()}", file=sys.stderr)
        return 1
    print(f"Migrating {name} with Parallax...", flush=True)
    return migrate(name)


def migrate(name: str) -> int:
    there = find(name)
    if there and squash(there).exists():
        if "--verbose" in sys.argv:
            print("Image already migrated. Nothing to do.", file=sys.stderr)
        return 0
    done = podman("image", "inspect", name, check=False)
    if done.returncode:
        print(f"Failed to migrate image {name}: Image not found", file=sys.stderr)
        return 1
    (source,) = json.loads(done.stdout)
    fail = (HERE / "fail").read_text().strip() if (HERE / "fail").exists() else ""
    if fail == "full":
        text = "mksquashfs: exit status 1\nWrite failed because No space left on device"
        print(f"Failed to migrate image {name}: {text}", file=sys.stderr)
        return 1
    if fail in ("middle", "silent"):
        add(name, source["Id"], "2 weeks ago", None)
        return 137 if fail == "middle" else 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        container = podman("create", "--network=none", name, "none").stdout.strip()
        try:
            podman("export", f"--output={folder}/tar", container)
        finally:
            podman("rm", container)
        subprocess.run(("tar", "-xf", f"{folder}/tar", "-C", str(tree)), check=True)
        # where the lab's container looks for the image's variables; podman has them in its database
        (tree / "etc").mkdir(exist_ok=True)
        (tree / "etc/environment").write_text("\n".join(source["Config"].get("Env") or ()) + "\n")
        add(name, source["Id"], "2 weeks ago", None, str(tree))
    return 0


def rmi(name: str) -> int:
    if image := find(name):  # `parallax --rmi` does not fail for what it does not find
        squash(image).unlink(missing_ok=True)
        save([one for one in listed() if one["id"] != image["id"]])
    return 0


def validate(path: str) -> int:
    try:
        table = tomllib.loads(Path(path).read_text())
        wrong = [key for key, kind in VALIDATED.items() if key in table and not isinstance(table[key], kind)]
    except (OSError, ValueError) as error:
        wrong = [str(error)]
    print(f"{path} is {'an INVALID' if wrong else 'a valid'} EDF file")
    if wrong:
        print(f"{wrong[0]} is not valid", file=sys.stderr)
    return bool(wrong)


def run(path: str, *command: str) -> int:
    image = str(tomllib.loads(Path(path).read_text())["image"])
    if not find(image) and pull(image):
        return 1
    print(f"ran {image}: {' '.join(command).removeprefix('-- ')}")
    return 0


def main() -> int:
    words = [word for word in sys.argv[1:] if word not in ("--verbose", "-v")]
    with (HERE / "calls").open("a") as log:
        log.write(" ".join(words).replace("\n", "\\n") + "\n")
    verbs = {"images": images, "pull": pull, "migrate": migrate, "rmi": rmi, "validate": validate, "run": run}
    return int(verbs[words[0]](*words[1:]))  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
