"""slurm.conf and its companions: virtual nodes that look like GH200 nodes, everything below one folder."""

import os
import pwd
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from tests.lab.plugins import plugstack

CPUS_PER_NODE = 288

CONFIG = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
FirstJobId={first_job_id}
AuthType=auth/munge
AuthInfo=cred_expire=5,socket={folder}/munge/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
EnforcePartLimits=ALL
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000,batch_sched_delay=0
KillWait=5
MinJobAge=600
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
{nodes}
PartitionName=normal Nodes=ALL Default=YES MaxTime=1-00:00:00 DefaultTime=01:00:00 State=UP
PartitionName=debug Nodes=ALL MaxTime=00:30:00 DefaultTime=00:10:00 State=UP
{extra}
"""
GH200 = "Sockets=4 CoresPerSocket=72 ThreadsPerCore=1 RealMemory=870000 Gres=gpu:4"
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} {node} State=UNKNOWN"


def write(
    folder: Path,
    nodes: Sequence[str],
    ports: Sequence[int],
    plugins: Sequence[str],
    extra: Sequence[str],
    node: str = GH200,
) -> None:
    """Write all configuration files; `ports`: the controller's, then one per node; `node`: what each node has."""
    folder.chmod(0o755)  # munged refuses a socket behind a private folder
    for name in ("state", "spool", "munge", "dev", "steps"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "steps").chmod(0o1777)
    lines = (NODE.format(name=name, port=port, node=node) for name, port in zip(nodes, ports[1:], strict=True))
    text = CONFIG.format(
        host=socket.gethostname().split(".")[0],
        user=pwd.getpwuid(os.geteuid()).pw_name,
        controller_port=ports[0],
        # a job's port follows from its id: clusters that live side by side on one machine number them apart
        first_job_id=ports[0] + 5000,
        folder=folder,
        nodes="\n".join(lines),
        extra="\n".join(extra),
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
    gres = gres_lines(folder, node)
    (folder / "gres.conf").write_text("".join(f"NodeName={name} {words}\n" for name in nodes for words in gres))
    (folder / "plugstack.conf").write_text(plugstack(plugins, folder))


def gres_lines(folder: Path, node: str) -> list[str]:
    """Lines of gres.conf for the word `Gres=NAME[:TYPE]:COUNT,…` of a node."""
    found = [word.removeprefix("Gres=").split(",") for word in node.split() if word.startswith("Gres=")]
    lines, gpus = [], 0
    for name, *kind, count in (each.split(":") for words in found for each in words):
        words = f"Name={name}{''.join(f' Type={each}' for each in kind)}"
        if name == "gpu":
            lines.append(f"{words} File={gpu_files(folder, gpus, int(count))}")
            gpus += int(count)
        else:
            lines.append(f"{words} Count={count}")
    return lines


def gpu_files(folder: Path, first: int, count: int) -> str:
    """Slurm's word for character devices; plain files would give no CUDA_VISIBLE_DEVICES and no error."""
    numbers = range(first, first + count)
    for number in numbers:
        device = folder / "dev" / f"gpu{number}"
        try:
            if not device.exists():
                os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(195, number))
        except PermissionError:  # an ordinary user, or a container without that right
            return f"/dev/tty[{10 + numbers[0]}-{10 + numbers[-1]}]"
    return f"{folder}/dev/gpu[{numbers[0]}-{numbers[-1]}]"
