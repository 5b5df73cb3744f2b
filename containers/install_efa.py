"""Install the EFA libraries and NCCL's OFI plug-in: python install_efa.py URL VERSION SHA256.

URL/aws-efa-installer-VERSION.tar.gz is Amazon's installer. Another checksum ends the build. The packages of the base
are removed first, because the installer refuses to replace some of them. Nothing but the standard library is needed; it
runs on Python 3.10 and newer.
"""

# ruff: noqa: T201 (what it prints is the build's log)

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

AMAZON = Path("/opt/amazon")
PLUGIN = AMAZON / "ofi-nccl/lib/libnccl-net-ofi.so"
# a plug-in that fits every version of NCCL, and no Open MPI: NGC has its own. The kernel module belongs to the host
OPTIONS = ("--build-ngc", "--skip-kmod", "--skip-limit-conf", "--skip-mpi", "--no-verify")


def main(url: str, version: str, checksum: str) -> None:
    """Replace the base's packages, and check what came."""
    with urllib.request.urlopen(f"{url}/aws-efa-installer-{version}.tar.gz") as answer:
        content = answer.read()
    found = hashlib.sha256(content).hexdigest()
    if found != checksum:
        sys.exit(f"aws-efa-installer-{version}.tar.gz has the checksum {found}, not {checksum}")
    remove_old()
    subprocess.run(("apt-get", "update"), check=False)  # if this fails, the installer names the package that it lacks
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extraction_filter = getattr(tarfile, "tar_filter", None)  # Python before 3.11.4 has no filters
            archive.extractall(folder)
        argv = ("bash", "./efa_installer.sh", "-y", *OPTIONS)
        subprocess.run(argv, cwd=f"{folder}/aws-efa-installer", check=True)
    shutil.rmtree("/var/lib/apt/lists", ignore_errors=True)
    check(version)


def remove_old() -> None:
    """Remove the base's libfabric and OFI plug-in, and the line for the loader that the packages leave behind."""
    shown = subprocess.run(("dpkg-query", "-W", "-f", "${Package}\n"), capture_output=True, text=True, check=True)
    old = [name for name in shown.stdout.split() if name.startswith(("libfabric", "libnccl-ofi"))]
    if old:
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(("apt-get", "purge", "-y", *old), check=True, env=environ)
    for folder in (AMAZON / "efa", AMAZON / "ofi-nccl", AMAZON / "aws-ofi-nccl"):
        shutil.rmtree(folder, ignore_errors=True)
    Path("/etc/ld.so.conf.d/aws-ofi-nccl.conf").unlink(missing_ok=True)


def check(version: str) -> None:
    """End the build if the plug-in is missing, or needs a library that the image lacks."""
    if not PLUGIN.exists():
        plugins = sorted(str(path) for path in AMAZON.glob("**/libnccl-net*"))
        sys.exit(f"EFA {version} installed no {PLUGIN}; it installed: {', '.join(plugins) or 'no plug-in'}")
    linked = subprocess.run(("ldd", str(PLUGIN)), capture_output=True, text=True, check=True).stdout
    missing = [line.split()[0] for line in linked.splitlines() if line.endswith("not found")]
    if missing:
        sys.exit(f"{PLUGIN} needs {', '.join(missing)}, which the image lacks")
    print(f"EFA {version}: {PLUGIN} is complete")


if __name__ == "__main__":
    main(*sys.argv[1:])
