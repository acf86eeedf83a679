"""A Slurm of one node, from Debian's packages, for as long as a `with` block: no systemd, no accounting, loopback only.

Everything (configuration, keys, state, logs) is in one folder, the daemons are our children, and their ports are free
ones, so that several may run side by side. Slurm 22.05 needs root for that.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
CPUS = 8
"""More than there are, so that a few sleeping jobs fit at once."""

CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5,socket={folder}/munge.sock
SlurmctldPort={port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:2 State=UNKNOWN
PartitionName=normal Nodes={host} Default=YES MaxTime=01:00:00 State=UP PriorityTier=1 GraceTime=15
PartitionName=urgent Nodes={host} MaxTime=01:00:00 State=UP PriorityTier=2
"""
GRES = "NodeName={host} Name=gpu File=/dev/null\nNodeName={host} Name=gpu File=/dev/zero\n"
"""Two GPUs that are none: Slurm only hands out their numbers."""


def why_not() -> str | None:
    """Why there can be no Slurm here; None when there can be one."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"needs Debian's slurmctld, slurmd, slurm-client and munge ({', '.join(missing)} not found)"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """A running Slurm with its files in `folder`; the environment that leads its commands there."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    machine = {"host": socket.gethostname().partition(".")[0], "folder": folder, "cpus": CPUS,
             "port": free_port(), "node_port": free_port()}  # fmt: skip
    (folder / "slurm.conf").write_text(CONF.format(**machine))
    (folder / "gres.conf").write_text(GRES.format(**machine))
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    paths = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log",
             "seed-file": "munge.seed"}  # fmt: skip
    munge = ["munged", "--foreground", "--force", *(f"--{key}={folder / name}" for key, name in paths.items())]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            with (folder / f"{command[0]}.out").open("wb") as out:
                daemons.append(subprocess.Popen(
                    command, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                ))  # fmt: skip
            _wait_for((folder / "munge.sock").exists, "munge")
        _wait_for(lambda: "idle" in _said(["sinfo", "-h", "-o", "%T"], environment), "slurmd")
        yield environment
    finally:
        _said(["scancel", "--user", "root"], environment)
        _wait_for(lambda: not _said(["squeue", "-h"], environment), "the last job's end")
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=20)


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _said(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False).stdout


def _wait_for(condition, what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)
