"""Unpack a commit of a repository: python fetch_commit.py URL COMMIT FOLDER.

URL/COMMIT.tar.gz is an archive as GitHub makes it. `git archive` writes the commit's id into the header of the archive:
another id ends the build. Nothing but the standard library is needed, not even git; it runs on Python 3.10 and newer.
"""

# ruff: noqa: T201 (what it prints is the build's log)

import io
import sys
import tarfile
import urllib.request
from pathlib import Path


def main(url: str, commit: str, folder: Path) -> None:
    """Write the files of the commit into the folder, which is made."""
    with urllib.request.urlopen(f"{url}/{commit}.tar.gz") as answer:
        content = answer.read()
    with tarfile.open(fileobj=io.BytesIO(content), format=tarfile.PAX_FORMAT) as archive:
        members = archive.getmembers()
        found = archive.pax_headers.get("comment", "no commit")
        if found != commit:
            sys.exit(f"{url}/{commit}.tar.gz contains {found}, not {commit}")
        kept = [member for member in members if "/" in member.name]  # without the folder REPOSITORY-COMMIT itself
        for member in kept:
            member.name = member.name.partition("/")[2]
        folder.mkdir(parents=True)
        archive.extraction_filter = getattr(tarfile, "tar_filter", None)  # Python before 3.11.4 has no filters
        archive.extractall(folder, kept)
    print(f"{len(kept)} files and folders of commit {commit} in {folder}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
