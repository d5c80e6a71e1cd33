"""Thirty-odd hostile programs: contained, the next one served, nothing left.

Every program's limits are small, so that a hole in one barrier meets another
before it meets this machine.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from rl_tpu.tools import sandbox
from rl_tpu.tools.sandbox import Limits, Result, Sandbox, SandboxError

LIMITS = Limits(
  seconds=60.0,
  cpu_seconds=1,
  memory_bytes=128 << 20,
  processes=4,
  output_bytes=4000,
)


@pytest.fixture(scope="module")
def boxes():
  """The patient one, and one for programs that no other limit ends."""
  try:
    hasty = dataclasses.replace(LIMITS, seconds=1.0)
    return Sandbox(LIMITS), Sandbox(hasty)
  except SandboxError as error:
    pytest.skip(str(error))


@pytest.fixture
def box(boxes):
  return boxes[0]


ESCAPED = str(6**9)
"""What a program prints that did what it should not; errors show its source,
which has the name alone."""

HOSTILE = {
  "a fork bomb": (
    "finished",
    """
import os
made = 0
for _ in range(6):
  try:
    os.fork()
    made += 1
  except OSError:
    break
print(ESCAPED if made > 3 else "held")
""",
  ),
  "a thread bomb": (
    "finished",
    """
import threading
wait = threading.Event()
made = 0
try:
  for _ in range(16):
    threading.Thread(target=wait.wait, daemon=True).start()
    made += 1
except RuntimeError:
  pass
print(ESCAPED if made > 3 else "held")
""",
  ),
  "a memory bomb": ("failed", "x = bytearray(1 << 30); print(ESCAPED)"),
  "a slow memory bomb": (
    "failed",
    "x = [bytearray(1 << 20) for _ in range(200)]\nprint(ESCAPED)",
  ),
  "shared memory": (
    "failed",
    "import mmap\nx = mmap.mmap(-1, 1 << 30); print(ESCAPED)",
  ),
  "memory in a file without a name": (
    "failed",
    "import os\nos.memfd_create('x'); print(ESCAPED)",
  ),
  "system V shared memory": (
    "finished",
    """
import ctypes
libc = ctypes.CDLL(None)
print(ESCAPED if libc.shmget(0, 4096, 0o1600) >= 0 else "held")
""",
  ),
  "a busy loop": ("killed", "while True: pass"),
  "sleep": ("timeout", "import time\ntime.sleep(3600)"),
  "a sleeping child that holds the output": (
    "finished",
    """
import os, time
if not os.fork():
  os.setsid()
  time.sleep(3600)
print("held")
""",
  ),
  "a daemon that forked twice and closed everything": (
    "finished",
    """
import os, time
if not os.fork():
  os.setsid()
  if not os.fork():
    os.closerange(0, 16)
    time.sleep(3600)
  os._exit(0)
print("held")
""",
  ),
  "infinite output": ("output", "while True: print('y' * 1000)"),
  "infinite output without line ends": (
    "output",
    "import os\nwhile True: os.write(1, b'\\xff' * 65536)",
  ),
  "infinite errors": (
    "output",
    "import os\nwhile True: os.write(2, b'e' * 65536)",
  ),
  "an internet socket": (
    "failed",
    """
import socket
socket.create_connection(("127.0.0.1", 80))
print(ESCAPED)
""",
  ),
  "a unix socket pair": (
    "failed",
    "import socket\nsocket.socketpair(); print(ESCAPED)",
  ),
  "a raw socket call": (
    "finished",
    """
import ctypes
libc = ctypes.CDLL(None)
print(ESCAPED if libc.syscall(41, 2, 1, 0) >= 0 else "held")
""",
  ),
  "reading /etc/passwd": (
    "failed",
    "print(open('/etc/passwd').read(), ESCAPED)",
  ),
  "reading other processes": (
    "failed",
    "import os\nprint(os.listdir('/proc'), ESCAPED)",
  ),
  "climbing out of the root": (
    "failed",
    "print(open('/../../../../etc/hostname').read(), ESCAPED)",
  ),
  "writing a file": ("failed", "open('/x', 'w'); print(ESCAPED)"),
  "writing into the library": (
    "failed",
    "import json\nopen(json.__file__, 'a'); print(ESCAPED)",
  ),
  "a file system that is not read-only": (
    "finished",
    """
import json, os
places = ("/", "/usr/lib", "/lib", json.__file__)
held = all(os.statvfs(place).f_flag & os.ST_RDONLY for place in places)
print("held" if held else ESCAPED)
""",
  ),
  "a symbolic link": (
    "failed",
    "import os\nos.symlink('/etc', '/tmp'); print(ESCAPED)",
  ),
  "removing the library": (
    "failed",
    "import json, os\nos.remove(json.__file__); print(ESCAPED)",
  ),
  "a device": (
    "failed",
    "import os\nos.mknod('/d', 0o60600, os.makedev(8, 0)); print(ESCAPED)",
  ),
  "becoming root": ("failed", "import os\nos.setuid(0); print(ESCAPED)"),
  "a namespace of its own": (
    "finished",
    """
import ctypes, os
libc = ctypes.CDLL(None)
calls = [libc.unshare(0x10000000), libc.syscall(56, 0x10000011, 0, 0, 0, 0)]
print("held" if calls == [-1, -1] else ESCAPED)
""",
  ),
  "mounting": (
    "finished",
    """
import ctypes
libc = ctypes.CDLL(None)
print(ESCAPED if not libc.mount(b"n", b"/usr", b"tmpfs", 0, b"") else "held")
""",
  ),
  "leaving the root again": (
    "failed",
    "import os\nos.chroot('/usr'); print(ESCAPED)",
  ),
  "another program": (
    "failed",
    """
import os
os.execv("/lib64/ld-linux-x86-64.so.2", ["x"])
""",
  ),
  "tracing its parent": (
    "finished",
    """
import ctypes
libc = ctypes.CDLL(None)
print(ESCAPED if not libc.ptrace(16, 1, 0, 0) else "held")
""",
  ),
  "killing everything": (
    "killed",
    """
import os
for pid in (1, -1):
  try:
    os.kill(pid, 9)
  except OSError:
    pass
os.kill(os.getpid(), 9)
""",
  ),
  "signals that it ignores": (
    "timeout",
    """
import signal, time
for number in range(1, 32):
  try:
    signal.signal(number, signal.SIG_IGN)
  except OSError:
    pass
time.sleep(3600)
""",
  ),
  "limits that it raises": (
    "failed",
    """
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
print(ESCAPED)
""",
  ),
  "a recursion without end": ("failed", "def f(): f()\nf()"),
  "a crash of the interpreter": (
    "killed",
    "import ctypes\nctypes.string_at(0)",
  ),
  "the environment": (
    "finished",
    "import os\nprint('held' if set(os.environ) <= {'LC_CTYPE'} else ESCAPED)",
  ),
  "a syntax error": ("failed", "while\n"),
  "bytes that are no text": (
    "finished",
    "import os\nos.write(1, b'\\xff\\xfe\\n')\nprint('held')",
  ),
  "an open file of the parent's": (
    "finished",
    """
import os
found = []
for number in range(3, 64):
  try:
    os.fstat(number)
    found.append(number)
  except OSError:
    pass
print(ESCAPED if found else "held", found)
""",
  ),
}


def left_behind(box):
  """Processes that the sandbox started and that are still there."""
  found = []
  for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      if box._root in (folder / "cmdline").read_text():
        found.append(folder.name)
    except OSError:
      pass  # it ended meanwhile
  return found


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_contained_and_the_next_one_served(boxes, name):
  mounts = pathlib.Path("/proc/self/mounts").read_text()
  ending, code = HOSTILE[name]
  box = boxes[ending == "timeout"]
  result = box.run(f"ESCAPED = 6 ** 9\n{code}")
  assert ESCAPED not in result.output
  assert result.ending == ending, result
  assert len(result.output) <= LIMITS.output_bytes
  assert left_behind(box) == []
  assert os.listdir(box._root) == []
  assert pathlib.Path("/proc/self/mounts").read_text() == mounts
  assert boxes[0].run("print('next')") == Result(
    ending="finished", output="next\n"
  )


def test_a_program_lives_in_namespaces_of_its_own(box):
  ours, theirs = {}, []
  for kind in ("net", "mnt", "ipc", "uts", "pid_for_children"):
    ours[kind] = os.readlink(f"/proc/self/ns/{kind}")
  thread = threading.Thread(
    target=box.run, args=("import time\ntime.sleep(1)",)
  )
  thread.start()
  while thread.is_alive():
    for pid in left_behind(box):
      with contextlib.suppress(OSError):
        theirs.append(
          {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ours}
        )
  assert any(all(one[kind] != ours[kind] for kind in ours) for one in theirs)


def test_errors_show_the_programs_own_lines(box):
  output = box.run("x = 1\ny = x / 0\n").output
  assert 'File "<program>", line 2' in output and "y = x / 0" in output
  assert "sandbox_process" not in output


def test_the_standard_library_is_there(box):
  code = "import math, re, json, fractions, statistics\nprint(math.comb(9, 4))"
  assert box.run(code) == Result(ending="finished", output="126\n")


def test_an_exit_code_is_no_signal(box):
  assert box.run("raise SystemExit(200)").ending == "failed"
  assert box.run("raise SystemExit").ending == "finished"


def test_programs_of_several_threads_do_not_meet(box):
  outputs = {}

  def run(i):
    code = f"import os\nprint({i}, os.getpid())"
    outputs[i] = box.run(code).output

  threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert outputs == {i: f"{i} 2\n" for i in range(4)}


def test_a_machine_without_namespaces_is_refused_with_what_it_lacks(
  monkeypatch, tmp_path
):
  # The same process, under a user that may not enter any.
  process = tmp_path / "sandbox_process.py"
  lines = sandbox._PROCESS.read_text().replace(
    '_call("unshare", flags)', 'raise OSError(1, "not permitted", "unshare")'
  )
  process.write_text(lines)
  monkeypatch.setattr(sandbox, "_PROCESS", process)
  if os.geteuid():
    pytest.skip("the line that this breaks is root's")
  with pytest.raises(SandboxError, match="unshare: not permitted"):
    Sandbox(LIMITS)


@pytest.mark.parametrize(
  "field", ["seconds", "cpu_seconds", "memory_bytes", "processes"]
)
def test_limits_out_of_range_are_refused(field):
  with pytest.raises(ValueError, match=rf"Limits.{field} is 0"):
    Limits(**{field: 0})


def test_the_process_needs_nothing_but_the_standard_library():
  code = """
import json, runpy, sys
runpy.run_path(sys.argv[1], run_name="looked_at")
print(json.dumps([m for m in ("numpy", "jax", "rl_tpu") if m in sys.modules]))
"""
  command = [sys.executable, "-I", "-S", "-c", code, str(sandbox._PROCESS)]
  out = subprocess.run(command, capture_output=True, text=True, check=True)
  assert json.loads(out.stdout) == []
