"""Finds the file system of a file, and so whether another machine may have the same file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_llama.engine.comm.machine import machine_name

MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = re.compile(
    "afs|beegfs|ceph|cifs|fhgfs|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs|pvfs2|"
    "smb3|smbfs|wekafs|9p|virtiofs"
)
_FUSE = re.compile(r"fuse(\..*)?")
_LOCAL_FUSE = re.compile(
    r"fuse\.(bindfs|encfs|ext2fs|fuse-overlayfs|gocryptfs|mergerfs|ntfs-3g|squashfuse|unionfs)"
)


def file_identity(name: str, mounts: Path = MOUNTS) -> str:
    """Return a text that two machines have alike only if they read the same file of a server.
    Files on disks of their own differ, even if one is a copy of the other with inode and time. A
    file system that is not known counts as such a disk. Raises OSError if there is no file."""
    status = os.stat(name)
    kind = _kind_of_file_system(status.st_dev, mounts)
    content = f"{status.st_size} {status.st_mtime_ns}"
    if _NETWORK.fullmatch(kind):
        return f"{status.st_ino} {content}"
    if _FUSE.fullmatch(kind) and not _LOCAL_FUSE.fullmatch(kind):
        # Each mount of it may number the files in its own way.
        return f"{os.path.abspath(name)} {content}"
    return f"{machine_name()} {status.st_dev} {status.st_ino} {content}"


def _kind_of_file_system(device: int, mounts: Path) -> str:
    """Return the kernel's name of the file system with this number; empty if it is not known."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2:3] == [number]:
            return file_system.partition(" ")[0]
    return ""
