"""The lab's Slurm by hand: `python -m tests.lab run | up | down | status`.

run       start it, open nothing, end it with Ctrl-C
up        start it and leave it running; prints what to paste:  eval "$(python -m tests.lab up)"
status    the exports again, and the nodes
down      end it
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

from tests.lab import processes
from tests.lab.plugins import cache_folder
from tests.lab.slurm import SlurmLab

USE = """\
Paste the export lines into another shell, in this folder; Ctrl-C here ends the lab.
Then try, with the image that ./nox -s demo makes:
  runner launch --env cpu --script hello --nodes 2 --wait
  runner status
  runner logs last"""


def _note() -> Path:
    """The file that names the folder of the lab that `up` has left running."""
    return cache_folder() / "up"


def _running() -> SlurmLab | None:
    folder = Path(_note().read_text()) if _note().exists() else None
    if folder is None or not processes.marked(folder):
        return None
    return SlurmLab(folder=folder)


def _print_exports(lab: SlurmLab) -> None:
    """What a shell needs: the lab's Slurm, `runner` beside this Python, and the images of the demo."""
    from runner.site_files import load_site

    print(f"export SLURM_CONF={shlex.quote(lab.environ['SLURM_CONF'])}")
    print(f"export RUNNER_IMAGES={shlex.quote(str(load_site('local').images(os.environ)))}")
    first = [str(lab.folder / "bin")] if lab.root else []
    print(f'export PATH={shlex.quote(":".join((*first, f"{sys.prefix}/bin")))}:"$PATH"')


def up() -> int:
    if (lab := _running()) is None:
        lab = SlurmLab().start(guarded=False)
        _note().write_text(str(lab.folder))
    _print_exports(lab)
    print("three idle nodes; end them with: python -m tests.lab down", file=sys.stderr)
    return 0


def run() -> int:
    with SlurmLab() as lab:
        _print_exports(lab)
        sys.stdout.flush()
        print(USE, file=sys.stderr, flush=True)
        endings = (signal.SIGINT, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_BLOCK, endings)  # sigwait needs them blocked; the daemons have started
        signal.sigwait(endings)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, endings)
    return 0


def down() -> int:
    if (lab := _running()) is not None:
        lab.stop()
    _note().unlink(missing_ok=True)
    print("ended" if lab else "no lab is up", file=sys.stderr)
    return 0


def status() -> int:
    if (lab := _running()) is None:
        print("no lab is up", file=sys.stderr)
        return 1
    _print_exports(lab)
    print(lab.run(("sinfo",)).stdout, end="", file=sys.stderr)
    return 0


def main() -> int:
    verbs = {"run": run, "up": up, "down": down, "status": status}
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=verbs)
    if shutil.which("slurmctld", path="/usr/sbin:/sbin:/usr/bin") is None:
        parser.error("slurmctld is not installed: apt-get install --no-install-recommends slurm-wlm slurm-client munge")
    return verbs[parser.parse_args().verb]()


if __name__ == "__main__":
    sys.exit(main())
