"""Download models, tokenizers, datasets and files by URL into a cache for jobs without network access.

    python jobs/prefetch.py --home CACHE/huggingface --wanted '{"kind": "model", "name": "openai-community/gpt2"}'

`runner prefetch JOB` runs this with the repositories that the job's arguments name. Needs huggingface_hub, but not
torch. A file appears only when it is complete; after an interruption, only missing files are downloaded. The record in
`prefetched/` is written last, when every file has the size that the hub lists. stdout is the folder of each repository.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training import errors, files, hub_files
from training.errors import JobError

TRIES = 5
ANSWER_SECONDS = 60.0
DRY_RUN_ANSWER_SECONDS = 10.0  # and no retries, because a dry run may fail without harm


@dataclass(frozen=True)
class Wanted:
    """A repository or file to download."""

    kind: str  # model, dataset or file
    name: str  # of a file: URL#sha256=CHECKSUM
    revision: str = "main"
    # for a dataset: its configuration; for a model: `tokenizer`, to get only the configuration and the tokenizer
    part: str = ""

    def __str__(self) -> str:
        part = f" ({self.part})" if self.part else ""
        return f"{self.kind} {self.name}{part}" + (f" at {self.revision}" if self.revision != "main" else "")

    @property
    def note(self) -> str:
        """The name of the file that records the download. runner looks for the same name."""
        if self.kind == "file":
            return f"files--{self.name[-64:].lower()}.json"
        words = (f"{self.kind}s", *self.name.split("/"), self.revision.replace("/", "-"), self.part.replace("/", "-"))
        return "--".join(word for word in words if word) + ".json"


def main(argv: Sequence[str]) -> int:
    """Download all repositories and return 0."""
    with errors.reported("prefetch"):
        arguments = parser().parse_args(argv)
        home = arguments.home.absolute()
        prepare(home)
        for text in arguments.wanted:
            wanted = Wanted(**json.loads(text))
            record = (fetch_file if wanted.kind == "file" else fetch)(wanted, home, dry_run=arguments.dry_run)
            print(json.dumps({"schema": 1} | record) if arguments.json else record["folder"], flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prefetch.py", allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--home", type=Path, required=True, help="the folder that is HF_HOME for jobs")
    parser.add_argument(
        "--wanted", action="append", required=True, help="what to download, as JSON: kind, name, revision, part"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be downloaded")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each download")
    return parser


def prepare(home: Path) -> None:
    """Configure huggingface_hub to use the cache, without progress bars in logs. Call this before importing it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    token = Path(os.environ.get("HF_HOME") or cache).expanduser() / "token"
    if token.is_file():
        os.environ.setdefault("HF_TOKEN_PATH", str(token))  # the token that `hf auth login` stored
    os.environ.update(HF_HOME=str(home), HF_HUB_CACHE=str(home / "hub"), HF_HUB_OFFLINE="0")
    os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_TELEMETRY="1")
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise JobError(
            f"{sys.executable} has no huggingface_hub",
            "the script needs this package to download from the hub",
            "use an environment whose image has the package (--env); for --engine host: pip install huggingface_hub",
        ) from error


def fetch(wanted: Wanted, home: Path, *, dry_run: bool = False) -> dict[str, Any]:
    """Download the files of one repository, and return the record to write when all of them are complete."""
    from huggingface_hub import HfApi

    seconds = DRY_RUN_ANSWER_SECONDS if dry_run else ANSWER_SECONDS
    with hub_errors(wanted):
        info = patiently(
            lambda: HfApi().repo_info(
                wanted.name, repo_type=wanted.kind, revision=wanted.revision, files_metadata=True, timeout=seconds
            ),
            tries=1 if dry_run else TRIES,
        )
    listed = {file.rfilename: int(file.size or 0) for file in info.siblings or ()}
    chosen = hub_files.choose(wanted.kind, wanted.part, listed, _card(info))
    if not chosen:
        raise JobError(
            f"the {wanted} contains no file that a job could use",
            f"the repository has {len(listed)} files, but no model or data file",
            "check the repository's page on the hub",
        )
    folder = home / "hub" / f"{wanted.kind}s--{wanted.name.replace('/', '--')}" / "snapshots" / info.sha
    missing = wrong(folder, chosen)
    record = {**asdict(wanted), "commit": info.sha, "folder": str(folder), "files": chosen}
    say(f"{wanted}: {len(chosen)} of {len(listed)} files, {amount(chosen.values())}"
        f"; {amount(chosen[name] for name in missing)} to download")  # fmt: skip
    if dry_run:
        return record
    started = time.monotonic()
    download(wanted, info.sha, chosen, missing, folder)
    if missing:
        say(f"{wanted}: complete after {time.monotonic() - started:.0f} s")
    if wanted.revision != info.sha:  # without network access, libraries look up the commit under this name
        files.write_text(folder.parents[1] / "refs" / wanted.revision, info.sha)
    files.write_json(home / "prefetched" / wanted.note, record)
    return record


def fetch_file(wanted: Wanted, home: Path, *, dry_run: bool = False) -> dict[str, Any]:
    """Download one file unless it is complete, and return the record to write when its checksum is right."""
    url, _, checksum = wanted.name.rpartition("#sha256=")
    checksum = checksum.lower()
    folder = home / "hub" / "files" / "snapshots" / checksum
    path = folder / (Path(urllib.parse.urlsplit(url).path).name or "file")
    record = {**asdict(wanted), "commit": checksum, "folder": str(folder)}
    if dry_run:
        say(f"{url}: {'in the cache' if path.is_file() else 'to download'}")
        return {**record, "files": {path.name: path.stat().st_size} if path.is_file() else {}}
    if not path.is_file() or _sha256(path) != checksum:
        folder.mkdir(parents=True, exist_ok=True)
        partial = files.unfinished(path)
        try:
            with hub_errors(wanted):
                patiently(lambda: _download(url, partial))
            found = _sha256(partial)
            if found != checksum:
                why, fix = f"its SHA-256 is {found}", "check the URL and its checksum: the file may have changed"
                raise JobError(f"{url} is not the expected file", why, fix)
            partial.replace(path)
            files.sync_folder(folder)
        finally:
            partial.unlink(missing_ok=True)
    say(f"{url}: {amount([path.stat().st_size])}")
    record["files"] = {path.name: path.stat().st_size}
    files.write_json(home / "prefetched" / wanted.note, record)
    return record


def _download(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer, path.open("wb") as file:
        shutil.copyfileobj(answer, file, 1 << 20)
        if answer.headers["Content-Length"] not in (None, str(file.tell())):
            raise ConnectionError(f"{url} ended after {file.tell()} bytes")
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def wrong(folder: Path, wanted: Mapping[str, int]) -> list[str]:
    """Return the files that are missing in the folder or have a wrong size."""

    def size(name: str) -> int:
        try:
            return (folder / name).stat().st_size
        except OSError:
            return -1

    return [name for name, size_bytes in wanted.items() if size(name) != size_bytes]


def download(wanted: Wanted, commit: str, chosen: Mapping[str, int], missing: Sequence[str], folder: Path) -> None:
    """Download the missing files, a few at a time. Raises JobError if the size of one differs from the hub's."""
    from huggingface_hub import hf_hub_download

    def one(name: str) -> None:
        path = folder / name
        path.resolve().unlink(missing_ok=True)  # incomplete: the library would treat it as complete
        path.unlink(missing_ok=True)
        patiently(lambda: hf_hub_download(wanted.name, name, repo_type=wanted.kind, revision=commit))
        if chosen[name] > 100_000_000:
            say(f"  {name} ({amount([chosen[name]])})")

    with hub_errors(wanted), ThreadPoolExecutor(4) as pool:
        list(pool.map(one, missing))
    left = wrong(folder, chosen)
    if left:
        raise JobError(
            f"the {wanted} was not downloaded completely: {len(left)} files have the wrong size",
            f"{left[0]} should have {chosen[left[0]]} bytes, as on the hub",
            "download again, and check that the disk is not full",
        )


def patiently(work: Any, tries: int = TRIES) -> Any:
    """Return the result of `work`. After a temporary network failure, try again with increasing pauses."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    for number in range(tries):
        try:
            return work()
        except Exception as error:
            # if the hub does not answer, the library says that the cache does not have the file
            local = isinstance(error, LocalEntryNotFoundError)
            cause = (error.__cause__ if local else None) or error
            if isinstance(cause, (RepositoryNotFoundError, GatedRepoError, JobError)):
                raise
            if isinstance(cause, EntryNotFoundError) and not local:
                raise
            status = getattr(getattr(cause, "response", None), "status_code", None) or getattr(cause, "code", None)
            if number + 1 == tries or (status is not None and status < 500 and status not in (408, 429)):
                raise
            time.sleep(float(os.environ.get("RUNNER_RETRY_SECONDS", "1")) * 2**number)
    return None


@contextlib.contextmanager
def hub_errors(wanted: Wanted) -> Iterator[None]:
    """Convert exceptions of huggingface_hub to a JobError."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    what = f"cannot download the {wanted}"
    try:
        yield
    except JobError:
        raise
    except GatedRepoError as error:
        fix = "request access on the repository's page on the hub, then run `hf auth login`, or export HF_TOKEN"
        raise JobError(what, "the owner of the repository grants access only on request", fix) from error
    except RevisionNotFoundError as error:
        raise JobError(
            what,
            f"the repository has no revision {wanted.revision!r}",
            "choose a revision on the repository's page on the hub",
        ) from error
    except RepositoryNotFoundError as error:
        why = "the hub has no repository of that name, or you have no access to it"
        raise JobError(what, why, "check the name; for a private repository, export HF_TOKEN") from error
    except Exception as error:  # exceptions of the HTTP library, which differs between versions
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        endpoint = wanted.name if wanted.kind == "file" else endpoint
        fix = f"check that {endpoint} can be reached (proxies, HF_ENDPOINT), and try again: downloaded files are kept"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space, and try again: downloaded files are kept"
        raise JobError(what, first, fix) from error


def _card(info: Any) -> Mapping[str, Any]:
    card = getattr(info, "card_data", None) or getattr(info, "cardData", None) or {}
    return card if isinstance(card, Mapping) else dict(card.to_dict())


def amount(sizes: Iterator[int] | Sequence[int] | Any) -> str:
    """Format a number of bytes: 5.4 GB."""
    size = float(sum(sizes))
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
