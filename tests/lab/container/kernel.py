"""The few system calls that Python 3.11 does not offer: namespaces and mounts."""

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_NOATIME, MS_NODIRATIME, MS_RELATIME = 0x2, 0x4, 0x8, 0x400, 0x800, 0x200000
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(path: str) -> None:
    """Enter the namespace that a file of /proc/PID/ns stands for."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(handle, 0), f"setns {path}")
    finally:
        os.close(handle)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    texts = (os.fsencode(source), os.fsencode(target), os.fsencode(kind) or None)
    _check(_libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(data) or None), f"mount {source} on {target}")


def bind(source: str, target: str, read_only: bool = False) -> None:
    """Bind with everything below; `read_only` makes the top mount read-only and keeps its other flags."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        make_read_only(target)


def make_read_only(target: str) -> None:
    """Turn a mount read-only. In a user namespace the flags that the host set must be repeated."""
    kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    present = os.statvfs(target).f_flag
    for statfs_flag, mount_flag in ((0x400, MS_NOATIME), (0x800, MS_NODIRATIME), (0x1000, MS_RELATIME)):
        kept |= mount_flag if present & statfs_flag else 0
    mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def umount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new: str) -> None:
    """Make `new` the root of this mount namespace and let go of the old one."""
    os.chdir(new)
    _check(_libc.syscall(ctypes.c_long(PIVOT_ROOT[os.uname().machine]), b".", b"."), f"pivot_root {new}")
    umount(".")
    os.chdir("/")


def map_ids(inside_user: int, inside_group: int, outside_user: int, outside_group: int) -> None:
    """Fill the maps of the user namespace just made: one user, one group."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside_user} {outside_user} 1"),
        ("gid_map", f"{inside_group} {outside_group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - one write, no buffering surprises
            file.write(text)


def become(user: int, group: int) -> None:
    """Have these ids instead of root's, which this process has in the container's user namespace."""
    if user != 0:
        unshare(CLONE_NEWUSER)
        map_ids(user, group, 0, 0)
