"""The process in which `sandbox.py` runs one program; see there.

  python -I -S sandbox_process.py SETTINGS        the program comes on stdin

Three processes, parent to child. The outer one enters new namespaces and waits.
The first of the new process namespace mounts a root that holds Python's library
alone, waits, and takes everybody in the namespace with it when it ends. The
inner one gives up what is left of its rights and becomes the program.

Plain system calls through ctypes, for nothing may be installed for it. Writes
`contained` to stderr when all is in place, else what is missing.
"""

import ctypes
import json
import linecache
import os
import resource
import signal
import struct
import sys
import traceback
from typing import NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_U64 = ctypes.c_uint64

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
  0x10000000,
  0x20000000,
  0x40000000,
)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_FIRST_UID = 0x70000000
"""Program uids when root runs us, one each: their processes are counted by it,
and no other user is likely to have one."""

# x86-64 numbers of what no program needs: sockets, other processes' memory,
# namespaces, mounts, memory that no limit counts, keys, kernel modules and
# tracing, clocks, and the newer doors to the same.
_DENIED = (
  *(41, 42, 43, 49, 50, 53, 288),  # socket connect accept bind listen pair
  *(29, 30, 31, 67),  # shmget shmat shmctl shmdt
  *(64, 65, 66, 220, 68, 69, 70, 71),  # semaphores and message queues
  *(240, 241, 242, 243, 244, 245, 319, 447),  # mq_*, memfd_create, _secret
  *(101, 310, 311, 312, 434, 438),  # ptrace process_vm_* kcmp pidfd_*
  *(155, 161, 165, 166, 167, 168, 169),  # pivot_root chroot mount swap reboot
  *(428, 429, 430, 431, 432, 433, 442),  # the new mount calls
  *(272, 308),  # unshare setns
  *(170, 171, 172, 173, 103, 163),  # names, ioperm, syslog, acct
  *(175, 176, 313, 246, 320),  # modules, kexec
  *(248, 249, 250),  # keys
  *(321, 298, 323, 425, 426, 427),  # bpf perf userfaultfd io_uring
  *(159, 164, 227, 305),  # clocks
  *(135, 141, 142, 144, 203, 251, 304),  # personality, priorities, handles
  *(237, 238, 256, 279, 300, 301),  # memory policy, fanotify
  *(59, 322),  # execve execveat
)
_CLONE, _CLONE3, _ENOSYS, _EPERM = 56, 435, 38, 1


def main(settings: dict) -> None:
  """Contains whatever stdin holds, runs it and exits as it does."""
  settings["uid"] = _FIRST_UID + os.getpid()
  try:
    _refuse_other_machines()
    _enter_namespaces()
    child = os.fork()
    if not child:
      _first_process(settings)
  except OSError as error:
    _give_up(f"{error.filename or 'a system call'}: {error.strerror}")
  _, status = os.waitpid(child, 0)
  # The code of the program, unless the first process was killed itself.
  os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else _code(status))


def _first_process(settings: dict) -> None:
  """Process 1 of the namespace; when it ends, so does all within."""
  try:
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _mount_root(settings["root"])
    child = os.fork()
    if not child:
      _program(settings)
  except OSError as error:
    _give_up(f"{error.filename or 'a system call'}: {error.strerror}")
  while True:
    ended, status = os.wait()
    if ended == child:
      os._exit(_code(status))


def _program(settings: dict) -> None:
  """Gives up the rest and becomes the program."""
  try:
    code = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    os.close(0)
    os.open("/", os.O_RDONLY)  # in place of the input
    _limit(settings)
    _give_up_rights(settings["uid"])
    _deny_calls()
  except OSError as error:
    _give_up(f"{error.filename or 'a system call'}: {error.strerror}")
  os.write(2, b"contained\n")
  os.dup2(1, 2)
  sys.stdin, sys.argv = None, ["program"]
  linecache.cache["<program>"] = (0, None, code.splitlines(True), "<program>")
  try:
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
  except Exception as error:
    # The frames above the program are none of its business.
    within = error.__traceback__ and error.__traceback__.tb_next
    traceback.print_exception(type(error), error, within)
    sys.exit(1)
  sys.exit(0)


def _refuse_other_machines() -> None:
  machine = os.uname()
  if (machine.sysname, machine.machine) != ("Linux", "x86_64"):
    _give_up(f"{machine.sysname} on {machine.machine} is not Linux on x86_64")


def _enter_namespaces() -> None:
  """Enters them; as another user than root, through one for users too."""
  flags = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC
  flags |= _CLONE_NEWPID | _CLONE_NEWNET
  uid, gid = os.geteuid(), os.getegid()
  if not uid:
    _call("unshare", flags)
    return
  _call("unshare", flags | _CLONE_NEWUSER)
  for name, text in (
    ("setgroups", "deny"),
    ("uid_map", f"{uid} {uid} 1"),
    ("gid_map", f"{gid} {gid} 1"),
  ):
    with open(f"/proc/self/{name}", "w") as file:
      file.write(text)


def _mount_root(root: str) -> None:
  """Makes `root` the root: shared libraries and Python's, read-only."""
  os.umask(0o022)
  _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
  _mount("none", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
  for path in _library_paths():
    inside = root + path
    os.makedirs(os.path.dirname(inside), exist_ok=True)
    if os.path.islink(path):
      os.symlink(os.readlink(path), inside)
    else:
      os.mkdir(inside)
      _mount(path, inside, None, _MS_BIND | _MS_REC)
  os.mkdir(root + "/old")
  # mount_setattr(2): the kernel is 5.12 or newer.
  attributes = struct.pack("4Q", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, 0, 0, 0)
  _call("syscall", 155, root.encode(), (root + "/old").encode())
  os.chdir("/")
  _call("umount2", b"/old", _MNT_DETACH)
  os.rmdir("/old")
  _call("syscall", 442, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, _U64(32))


def _library_paths() -> list[str]:
  """Folders that a running Python still reads, outermost first."""
  wanted = [
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    sys.base_prefix + "/lib",
  ]
  kept: list[str] = []
  for path in wanted:
    inside = any(path.startswith(one + "/") for one in kept)
    if os.path.isdir(path) and path not in kept and not inside:
      kept.append(path)
  return kept


def _limit(settings: dict) -> None:
  for name, value in (
    ("AS", settings["memory_bytes"]),
    ("CPU", settings["cpu_seconds"]),
    # In a user namespace of its own the two processes above it count too.
    ("NPROC", settings["processes"] + (2 if os.geteuid() else 0)),
    ("NOFILE", 16),
    ("FSIZE", 0),
    ("CORE", 0),
    ("MEMLOCK", 0),
    ("MSGQUEUE", 0),
    ("SIGPENDING", 64),
    ("STACK", 8 << 20),
  ):
    kind = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
      value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _give_up_rights(uid: int) -> None:
  """Leaves no capability, no other group, and no way to gain any."""
  if not os.geteuid():
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
  header, nothing = (
    struct.pack("Ii", 0x20080522, 0),
    struct.pack("6I", *[0] * 6),
  )
  _call("capset", header, nothing)
  _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _deny_calls() -> None:
  """Installs the filter, which every process of the program inherits."""
  load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
  kill, refuse, allow = 0x80000000, 0x00050000, 0x7FFF0000
  lines = [
    (load, 0, 0, 4),  # the architecture
    (equal, 1, 0, 0xC000003E),
    (answer, 0, 0, kill),
    (load, 0, 0, 0),  # the number of the call
    (at_least, 0, 1, 0x40000000),  # of the x32 interface
    (answer, 0, 0, kill),
    (equal, 0, 1, _CLONE3),  # its flags lie in memory; clone is the fallback
    (answer, 0, 0, refuse | _ENOSYS),
    (equal, 0, 4, _CLONE),
    (load, 0, 0, 16),  # its flags
    (any_bit, 0, 1, 0x7E020000),  # that make namespaces
    (answer, 0, 0, refuse | _EPERM),
    (answer, 0, 0, allow),
  ]
  for number in _DENIED:
    lines += [(equal, 0, 1, number), (answer, 0, 0, refuse | _EPERM)]
  lines.append((answer, 0, 0, allow))
  code = b"".join(struct.pack("HBBI", *line) for line in lines)

  class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

  program = Program(len(lines), code)
  _call("prctl", _PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)


def _mount(
  source: str, target: str, kind: str | None, flags: int, data: str = ""
) -> None:
  _call(
    "mount",
    source.encode(),
    target.encode(),
    kind.encode() if kind else None,
    ctypes.c_ulong(flags),
    data.encode(),
  )


def _call(name: str, *arguments) -> None:
  """Calls the C library; raises OSError that names the call."""
  if getattr(_LIBC, name)(*arguments) < 0:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), name)


def _code(status: int) -> int:
  """An exit code: 128 and more says that a signal killed it."""
  if os.WIFSIGNALED(status):
    return 128 + os.WTERMSIG(status)
  return min(os.WEXITSTATUS(status), 127)


def _give_up(why: str) -> NoReturn:
  os.write(2, why.encode(errors="replace") + b"\n")
  os._exit(1)


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
