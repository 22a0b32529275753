"""Run a program as another user who can write to /tmp and /dev/shm and nowhere else, as in a container; wants root.

    python confined.py UID FOLDER,FOLDER,... PROGRAM ARGUMENT ...

In a mount namespace of its own, so that the machine is left as it is. The folders are those that the program needs: one
that lies where only root can go (a virtual environment of ``mktemp -d``, say) is mounted at the same path again, below
empty folders that everybody may pass.
"""

import ctypes
import os
import sys
from pathlib import Path

NEW_NAMESPACE = 0x20000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
WRITABLE = "/tmp", "/dev/shm"

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    check(libc.mount(*map(os.fsencode, (source, target, kind)), ctypes.c_ulong(flags), options.encode()))


def is_blocked(folder: Path) -> bool:
    return not folder.stat().st_mode & 0o001


def show(folder: Path, descriptor: int) -> None:
    """Let everybody reach a folder at its own path, which was opened before anything was mounted."""
    blocked = next((each for each in reversed(folder.parents) if each.exists() and is_blocked(each)), None)
    if blocked is not None:
        mount("tmpfs", str(blocked), "tmpfs", 0, "mode=755")
    folder.mkdir(parents=True, exist_ok=True)
    mount(f"/proc/self/fd/{descriptor}", str(folder), "", BIND | RECURSIVE)


def confine(uid: int, folders: list[Path]) -> None:
    check(libc.unshare(NEW_NAMESPACE))
    mount("", "/", "", PRIVATE | RECURSIVE)
    opened = {folder: os.open(folder, os.O_PATH) for folder in folders}  # here: no other namespace's can be mounted
    for writable in WRITABLE:
        mount("tmpfs", writable, "tmpfs", 0, "mode=1777")
    os.umask(0o022)
    for folder, descriptor in opened.items():
        show(folder, descriptor)
    for place in ("/", *map(str, folders)):
        mount("", place, "", REMOUNT | BIND | READ_ONLY)
    os.chdir("/")
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


if __name__ == "__main__":
    confine(int(sys.argv[1]), sorted(map(Path, sys.argv[2].split(","))))
    os.environ["HOME"] = "/tmp"
    os.execv(sys.argv[3], sys.argv[3:])
