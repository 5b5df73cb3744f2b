"""A training of lock-stepped ranks without a framework: `python3 trainer.py STEPS SAVE_EVERY SECONDS_PER_STEP`.

It does what the contract of a run asks of any training, and no more: it goes on from the newest whole checkpoint, saves
every so many steps, saves and leaves when it is told to, tells of its progress. When a rank is lost the others wait
for it for ever, as NCCL does. It runs on any number of ranks, and resumes on another number. It records what it does
outside the run folder, in $FAULTS_ACCOUNT, one line each:

    ATTEMPT RANK PID WHAT WORD UNIX_TIME NODE

WHAT WORD: begins STEP | step N | saved N | leaves N | damaged NAME | finished STATE
"""

import contextlib
import errno
import faulthandler
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

RUN, ATTEMPT = Path(os.environ["RUNNER_RUN"]), Path(os.environ["RUNNER_ATTEMPT"])
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NODE = os.environ.get("SLURMD_NODENAME", "-")
CHECKPOINTS = RUN / "checkpoints"
PLACE = Path(
    os.environ["FAULTS_ACCOUNT"]
).parent  # where faults are asked for: `hang-…`, `exit-…`, `abort-ATTEMPT-RANK`, `deaf`
PARTS = 8  # of a checkpoint: more than one write, so that it can be caught half-way
KEEP = 2


def note(*words: object) -> None:
    line = " ".join(map(str, (ATTEMPT.name, RANK, os.getpid(), *words, f"{time.time():.3f}", NODE)))
    with Path(os.environ["FAULTS_ACCOUNT"]).open("a") as account:
        account.write(f"{line}\n")


def after(state: str, step: int) -> str:
    """The state that a step makes of the one before: skipped and doubled steps show at the end."""
    return hashlib.sha256(f"{state} {step}".encode()).hexdigest()


def save(step: int, state: str) -> None:
    folder, partial = CHECKPOINTS / f"checkpoint-{step}", CHECKPOINTS / f".checkpoint-{step}-{os.getpid()}.partial"
    partial.mkdir(parents=True)
    for part in range(PARTS):
        write(partial / f"part-{part}", state * 256)
        select.select((), (), (), 0.005)
    if folder.exists():  # of an attempt that was ended before the marker
        shutil.rmtree(folder)
    partial.rename(folder)
    write(folder / ".complete.partial", json.dumps({"step": step, "state": state}))
    (folder / ".complete.partial").rename(folder / "complete.json")
    note("saved", step)
    for old in sorted(CHECKPOINTS.glob("checkpoint-*"), key=number)[:-KEEP]:
        (old / "complete.json").unlink(missing_ok=True)
        shutil.rmtree(old)


def hang_here() -> None:
    select.select((), (), (), 0.1)


def die_if_asked() -> None:
    """Print the text of the file that asks for it, and exit with 1 or abort, as a framework does after an error."""
    for name, end in (("exit", lambda: os._exit(1)), ("abort", os.abort)):
        request = PLACE / f"{name}-{ATTEMPT.name}-{RANK}"
        if request.exists():
            sys.stderr.write(request.read_text())
            sys.stderr.flush()
            end()


def write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def newest() -> tuple[int, str]:
    """Step and state of the newest checkpoint that has its marker; every byte of it is looked at."""
    for folder in sorted(CHECKPOINTS.glob("checkpoint-*"), key=number, reverse=True):
        if not (folder / "complete.json").exists():
            continue
        marker = json.loads((folder / "complete.json").read_text())
        if all((folder / f"part-{part}").read_text() == marker["state"] * 256 for part in range(PARTS)):
            return marker["step"], marker["state"]
        note("damaged", folder.name)
    return 0, ""


def listen() -> socket.socket:
    """At MASTER_PORT, or at any free port if it is taken."""
    address = os.environ["MASTER_ADDR"]
    try:
        return socket.create_server((address, int(os.environ["MASTER_PORT"])))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return socket.create_server((address, 0))


class Others:
    """The other ranks, met at MASTER_ADDR: `agree` returns rank 0's word to all.

    The file `port` of the attempt has the port: another cluster on this machine may have taken MASTER_PORT.
    """

    def __init__(self) -> None:
        self.peers: list[socket.socket] = []
        if RANK == 0:
            with listen() as server:
                write(ATTEMPT / ".port", str(server.getsockname()[1]))
                (ATTEMPT / ".port").rename(ATTEMPT / "port")
                self.peers = [server.accept()[0] for _ in range(RANKS - 1)]
        while RANK and not self.peers:
            try:
                port = int((ATTEMPT / "port").read_text())
                self.peers = [socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=5)]
                self.peers[0].settimeout(None)
            except OSError:
                select.select((), (), (), 0.05)

    def agree(self, word: bytes) -> bytes:
        if RANK == 0:
            for peer in self.peers:
                self._receive(peer)
        else:
            self._send(self.peers[0], b".")
            return self._receive(self.peers[0])
        for peer in self.peers:
            self._send(peer, word)
        return word

    def _send(self, peer: socket.socket, word: bytes) -> None:
        with contextlib.suppress(OSError):  # lost
            peer.send(word)

    def _receive(self, peer: socket.socket) -> bytes:
        while True:
            try:
                word = peer.recv(1)
            except OSError:
                word = b""
            if word:
                return word
            select.select((), (), (), 600)  # lost


def main() -> None:
    steps, every, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    signal.signal(signal.SIGUSR2, lambda *_: None)  # the flag says it
    stacks = ATTEMPT / "stacks" / f"rank-{RANK}.txt"
    stacks.parent.mkdir(exist_ok=True)
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"))
    CHECKPOINTS.mkdir(exist_ok=True)
    others = Others()
    others.agree(b"-")
    step, state = newest()
    note("begins", step)
    while step < steps:
        select.select((), (), (), seconds)  # libfaketime breaks time.sleep
        while (PLACE / f"hang-{ATTEMPT.name}-{RANK}").exists():
            hang_here()
        die_if_asked()
        told = (ATTEMPT / "save-and-exit").exists() and not (PLACE / "deaf").exists()
        if others.agree(b"x" if told else b"-") == b"x":
            if RANK == 0:
                if not (CHECKPOINTS / f"checkpoint-{step}" / "complete.json").exists():
                    save(step, state)
                note("leaves", step)
            raise SystemExit(75)
        step, state = step + 1, after(state, step + 1)
        if RANK != 0:
            continue
        note("step", step)
        (ATTEMPT / "heartbeat").touch()
        entry = {"step": step, "attempt": int(ATTEMPT.name), "time": round(time.time(), 3)}
        with (RUN / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(entry) + "\n")
        if step % every == 0 or step == steps:
            save(step, state)
    others.agree(b"-")
    if RANK == 0:
        note("finished", state)


if __name__ == "__main__":
    main()
