"""Where a run is launched to: one small file for a project and its clusters.

What a run computes stands in its own config, its topologies too
(`config.compile`); what differs from one project, bucket or cluster to another
stands here, so that one settings file serves many runs.
"""

import dataclasses
import posixpath
import re
from collections.abc import Iterable

from rl_tpu.config import ConfigError

_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_LONGEST_NAME = 27
"""Sweeps add 9 characters, and xpk allows 40 to NAME-generator-I."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Of every backend; each says which fields it needs."""

  name: str
  """Of the run; all that is created is called by it. Lower case letters, digits
  and dashes, at most 27."""
  generators: int = 1
  """Generator slices, >= 0; 0: the trainer's first process generates too."""
  project: str | None = None
  """Google Cloud project (tpu_vm, xpk, pathways)."""
  zone: str | None = None
  """Its zone, such as us-east5-a (tpu_vm, xpk, pathways)."""
  cluster: str | None = None
  """GKE cluster (xpk, pathways)."""
  context: str | None = None
  """kubectl's context (gke, and a sweep's look at xpk's and pathways' runs);
  None: the current one."""
  namespace: str = "default"
  """Kubernetes namespace (gke, xpk, pathways)."""
  image: str | None = None
  """Container image with this repository, see launch/Containerfile (all but
  local)."""
  service_account: str | None = None
  """Kubernetes service account (gke), or e-mail of a Google one (tpu_vm); None:
  the default."""
  queue: str | None = None
  """Kueue's local queue (gke); None: there is none."""
  mount: str = "/shared"
  """Where every host sees the storage that all of them share; a run's directory
  and cache are below it."""
  nfs: str | None = None
  """That storage: HOST:/PATH of Filestore or another NFS server (gke, tpu_vm).
  """
  bucket: str | None = None
  """Or else a bucket, mounted by Cloud Storage FUSE (gke): one with a
  hierarchical namespace, whose renames are atomic."""
  storage: str | None = None
  """What `xpk storage attach` called it, mounted at `mount` (xpk, pathways)."""
  artifacts: str | None = None
  """gs://BUCKET/FOLDER for what Pathways itself keeps (pathways)."""
  token_secret: str | None = None
  """Kubernetes Secret whose key `token` is the generators' admin token (gke).
  """
  token_file: str | None = None
  """File with that token on the shared storage (tpu_vm, xpk)."""
  spot: bool = False
  """Whether to ask for spot capacity, which may be taken away."""
  reservation: str | None = None
  """Name of the reservation to use (tpu_vm: the project's, whatever its name);
  None: none."""
  port: int = 8470
  """gRPC port of each generator, in [1, 65535]."""
  restarts: int = 10
  """Times that a failed trainer goes on from its newest checkpoint, and that a
  generator is started again, >= 0. Evictions do not count on gke."""
  grace_seconds: int = 300
  """Between SIGTERM and SIGKILL, for the last checkpoint, >= 1. Spot capacity
  leaves about 30 whatever is asked for."""
  flags: tuple[str, ...] = ()
  """More flags of trainer and generators that only make sense there, such as
  --config.pretrained=/shared/qwen3-8b; they are not checked here."""

  def __post_init__(self):
    for field, good, allowed in (
      (
        "name",
        re.fullmatch(_LABEL, self.name) and len(self.name) <= _LONGEST_NAME,
        f"a letter, then letters, digits and dashes, lower case, at most "
        f"{_LONGEST_NAME}",
      ),
      ("generators", self.generators >= 0, ">= 0"),
      ("namespace", re.fullmatch(_LABEL, self.namespace), "a DNS label"),
      ("mount", _is_folder(self.mount), "an absolute path, and not /"),
      (
        "nfs",
        self.nfs is None or re.fullmatch(r"[\w.-]+:/[\w./-]*", self.nfs),
        "HOST:/PATH",
      ),
      (
        "bucket",
        self.bucket is None or re.fullmatch(r"[a-z0-9][\w.-]+", self.bucket),
        "a bucket's name, without gs:// and folders",
      ),
      (
        "artifacts",
        self.artifacts is None or self.artifacts.startswith("gs://"),
        "gs://BUCKET/FOLDER",
      ),
      (
        "image",
        self.image is None or re.fullmatch(r"[\w.:/@-]+", self.image),
        "a container image such as HOST/PROJECT/REPOSITORY/rl_tpu:TAG",
      ),
      (
        "token_file",
        self.token_file is None or self.token_file.startswith(self.mount + "/"),
        f"a path below settings.mount, {self.mount}",
      ),
      (
        "reservation",
        not (self.spot and self.reservation),
        "None where settings.spot is True",
      ),
      ("port", 0 < self.port < 2**16, "in [1, 65535]"),
      ("restarts", self.restarts >= 0, ">= 0"),
      ("grace_seconds", self.grace_seconds >= 1, ">= 1"),
      (
        "flags",
        all(re.match(r"--config\.\w", flag) for flag in self.flags),
        "a list of --config.FIELD=VALUE",
      ),
    ):
      if not good:
        raise ConfigError(
          f"settings.{field} is {getattr(self, field)!r}; it must be {allowed}"
        )

  def need(self, backend: str, fields: Iterable[str]) -> None:
    """Refuses settings that lack what a backend cannot do without.

    Args:
      backend: its name, for the message.
      fields: each a field that must be set, or several joined by `|`, exactly
        one of which must be.

    Raises:
      ConfigError: names the field.
    """
    for field in fields:
      names = field.split("|")
      given = [name for name in names if getattr(self, name) is not None]
      if len(given) != 1:
        what = " and ".join(f"settings.{name}" for name in given or names)
        allowed = "one of them" if len(names) > 1 else "set"
        is_are = "are" if len(given or names) > 1 else "is"
        raise ConfigError(
          f"{what} {is_are} {'set' if given else 'None'}; {backend} needs "
          f"{' or '.join(f'settings.{name}' for name in names)} {allowed}"
        )

  def below_mount(self, path: str) -> str:
    """A path of the run's config, on the shared storage.

    Raises:
      ConfigError: it is an address of object storage, not a path.
    """
    if "://" in path:
      raise ConfigError(
        f"{path!r} is an address; it must be a path below settings.mount, "
        "where settings.nfs, bucket or storage is mounted"
      )
    return posixpath.normpath(posixpath.join(self.mount, path))


def _is_folder(path: str) -> bool:
  return path != "/" and re.fullmatch(r"(/[\w.-]+)+", path) is not None
