"""A run on Kubernetes: one JobSet, trainer and generators on separate slices.

JobSet (0.10.1 or later) gives every pod a name in a headless service, by which
trainer and generators find each other before any of them is up:
RUN-generator-2-0.RUN is the generator on the third slice. The trainer's
processes fail together, and the whole set starts again; `--resume=auto` goes on
from the newest checkpoint. A generator that fails is started again alone, as a
trainer does not mind. An eviction (maintenance, spot) counts as no failure, and
what the run itself refuses (exit code 2) is not tried again. The set is
complete when the trainer is; that ends the generators too.
"""

import subprocess
from typing import Any

import yaml

from launch.plan import Plan, Slices, addresses, make
from launch.settings import Settings
from launch.steps import Step

__all__ = ["NEEDS", "logs", "make", "outcome", "start", "status", "stop"]

NEEDS = ("image", "nfs|bucket", "token_secret")
ACCELERATORS = {
  "v5e": "tpu-v5-lite-podslice",
  "v5p": "tpu-v5p-slice",
  "v6e": "tpu-v6e-slice",
}
"""Of the label cloud.google.com/gke-tpu-accelerator."""
COORDINATOR_PORT, MEGASCALE_PORT = 8482, 8080
"""JAX's and libtpu's own, where the trainer's processes meet."""
_TOKEN = "/etc/rl_tpu/token"
_JOB_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-index']"


def start(plan: Plan) -> list[Step]:
  """Sends the manifest."""
  apply = (*_kubectl(plan.settings), "apply", "--filename=-")
  return [Step(argv=apply, stdin=render(plan))]


def status(plan: Plan) -> Step:
  """Asks for the end that the set has come to."""
  return terminal_state(plan.settings, plan.name)


def terminal_state(settings: Settings, name: str) -> Step:
  """Asks for the end that a JobSet has come to."""
  path = "--output=jsonpath={.status.terminalState}"
  return Step(argv=(*_kubectl(settings), "get", "jobset", name, path))


def outcome(asked: subprocess.CompletedProcess[str]) -> str:
  """What the answer to `status` means: running, done, failed or absent."""
  if asked.returncode:
    return "absent"
  state = asked.stdout.strip()
  return {"Completed": "done", "Failed": "failed"}.get(state, "running")


def stop(plan: Plan) -> list[Step]:
  """Ends the pods, which write a checkpoint, and the set."""
  what = ("delete", "jobset", plan.name, "--ignore-not-found")
  return [Step(argv=(*_kubectl(plan.settings), *what))]


def logs(plan: Plan) -> list[Step]:
  """Follows the trainer's first process."""
  return [follow(plan.settings, plan.name, "trainer")]


def follow(settings: Settings, jobset: str, job: str) -> Step:
  """Follows the log of a replicated job's first pod."""
  prefix = "jobset.sigs.k8s.io"
  labels = (
    f"{prefix}/jobset-name={jobset}",
    f"{prefix}/replicatedjob-name={job}",
    f"{prefix}/job-index=0",
    "batch.kubernetes.io/job-completion-index=0",
  )
  what = ("logs", "--follow", "--tail=100", f"--selector={','.join(labels)}")
  return Step(argv=(*_kubectl(settings), *what))


def render(plan: Plan) -> str:
  """The manifest as text."""
  return yaml.safe_dump(manifest(plan), sort_keys=False, width=2**20)


def manifest(plan: Plan) -> dict[str, Any]:
  """The JobSet."""
  settings = plan.settings
  metadata: dict[str, Any] = {
    "name": plan.name,
    "namespace": settings.namespace,
    "labels": {"app.kubernetes.io/name": "rl_tpu"},
  }
  if settings.queue:
    metadata["labels"]["kueue.x-k8s.io/queue-name"] = settings.queue
  jobs = [_trainer(plan)]
  if plan.generators is not None:
    jobs.append(_generators(plan, plan.generators))
  return {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": metadata,
    "spec": {
      "network": {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,
        "subdomain": plan.name,
      },
      "successPolicy": {
        "operator": "All",
        "targetReplicatedJobs": ["trainer"],
      },
      "failurePolicy": {
        "maxRestarts": settings.restarts,
        "rules": [
          {
            "name": "refused",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [".*exit code 2 .*"],
          },
          {
            "name": "evicted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
          },
        ],
      },
      "replicatedJobs": jobs,
    },
  }


def _trainer(plan: Plan) -> dict[str, Any]:
  remote: tuple[str, ...] = ()
  if plan.generators is not None:
    port = plan.settings.port
    hosts = [
      f"{plan.name}-generator-{i}-0.{plan.name}:{port}"
      for i in range(plan.generators.count)
    ]
    remote = (addresses(hosts), f"--config.remote.token_file={_TOKEN}")
  container = {
    "command": list(plan.train(*remote)),
    "ports": [
      {"name": "coordinator", "containerPort": COORDINATOR_PORT},
      {"name": "megascale", "containerPort": MEGASCALE_PORT},
    ],
  }
  spec = {
    "backoffLimit": 0,
    "podFailurePolicy": {"rules": [_refused(), _evicted("FailJob")]},
  }
  job = _job(plan, "trainer", plan.trainer, container, spec)
  if plan.trainer.hosts > 1:
    # One slice is one node pool, and no two jobs share one.
    job["template"]["metadata"] = {
      "annotations": {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": (
          "cloud.google.com/gke-nodepool"
        )
      }
    }
  return job


def _generators(plan: Plan, slices: Slices) -> dict[str, Any]:
  port = plan.settings.port
  container = {
    "command": list(plan.serve(f"--config.serve.token_file={_TOKEN}")),
    "ports": [{"name": "grpc", "containerPort": port}],
    "readinessProbe": {"grpc": {"port": port}, "periodSeconds": 10},
  }
  spec = {
    "backoffLimit": plan.settings.restarts,
    "podFailurePolicy": {"rules": [_refused(), _evicted("Ignore")]},
  }
  return _job(plan, "generator", slices, container, spec)


def _job(
  plan: Plan,
  role: str,
  slices: Slices,
  container: dict[str, Any],
  spec: dict[str, Any],
) -> dict[str, Any]:
  """A replicated job: a job a slice, a pod a host."""
  chips = {"google.com/tpu": slices.chips}
  volumes, mounts = _volumes(plan)
  main = {
    "name": "main",
    "image": plan.settings.image,
    **container,
    "env": _environment(plan.name, role, slices.count),
    "resources": {"requests": chips, "limits": dict(chips)},
    "volumeMounts": mounts,
  }
  settings = plan.settings
  pod: dict[str, Any] = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": settings.grace_seconds,
    "nodeSelector": _nodes(settings, slices),
    "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}],
    "containers": [main],
    "volumes": volumes,
  }
  if settings.spot:
    spot = {"key": "cloud.google.com/gke-spot", "operator": "Exists"}
    pod["tolerations"].append(spot)
  if settings.service_account:
    pod["serviceAccountName"] = settings.service_account
  template: dict[str, Any] = {"spec": pod}
  if settings.bucket:
    template["metadata"] = {"annotations": {"gke-gcsfuse/volumes": "true"}}
  return {
    "name": role,
    "replicas": slices.count,
    "template": {
      "spec": {
        "parallelism": slices.hosts,
        "completions": slices.hosts,
        "completionMode": "Indexed",
        **spec,
        "template": template,
      }
    },
  }


def _environment(name: str, role: str, count: int) -> list[dict[str, Any]]:
  """What GKE would otherwise guess from all jobs of the set together.

  A trainer's slices compute together; each generator slice by itself.
  """
  trains = role == "trainer"
  index = {"fieldRef": {"fieldPath": _JOB_INDEX}}
  first = "0" if trains else "$(JOB_INDEX)"
  slice_id = "$(JOB_INDEX)" if trains else "0"
  return [
    {"name": "PYTHONUNBUFFERED", "value": "1"},
    {"name": "JOB_INDEX", "valueFrom": index},
    {"name": "MEGASCALE_NUM_SLICES", "value": str(count if trains else 1)},
    {"name": "MEGASCALE_SLICE_ID", "value": slice_id},
    {
      "name": "MEGASCALE_COORDINATOR_ADDRESS",
      "value": f"{name}-{role}-{first}-0.{name}",
    },
  ]


def _nodes(settings: Settings, slices: Slices) -> dict[str, str]:
  labels = {
    "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[slices.chip],
    "cloud.google.com/gke-tpu-topology": slices.shape,
  }
  if settings.spot:
    labels["cloud.google.com/gke-spot"] = "true"
  if settings.reservation:
    labels["cloud.google.com/reservation-name"] = settings.reservation
  return labels


def _volumes(plan: Plan) -> tuple[list[dict], list[dict]]:
  """The shared storage, and the generators' token."""
  settings = plan.settings
  if settings.nfs:
    server, _, path = settings.nfs.partition(":")
    shared: dict[str, Any] = {"nfs": {"server": server, "path": path}}
  else:
    attributes = {
      "bucketName": settings.bucket,
      "mountOptions": "implicit-dirs",
    }
    driver = "gcsfuse.csi.storage.gke.io"
    shared = {"csi": {"driver": driver, "volumeAttributes": attributes}}
  volumes = [{"name": "shared", **shared}]
  mounts: list[dict] = [{"name": "shared", "mountPath": settings.mount}]
  if settings.token_secret:
    secret = {"secretName": settings.token_secret, "defaultMode": 0o400}
    folder = _TOKEN.rpartition("/")[0]
    volumes.append({"name": "token", "secret": secret})
    mounts.append({"name": "token", "mountPath": folder, "readOnly": True})
  return volumes, mounts


def _refused() -> dict[str, Any]:
  """The run's config cannot be run: trying again is in vain."""
  codes = {"containerName": "main", "operator": "In", "values": [2]}
  return {"action": "FailJob", "onExitCodes": codes}


def _evicted(action: str) -> dict[str, Any]:
  """Maintenance, or spot capacity that was taken away."""
  target = {"type": "DisruptionTarget", "status": "True"}
  return {"action": action, "onPodConditions": [target]}


def _kubectl(settings: Settings) -> tuple[str, ...]:
  context = (f"--context={settings.context}",) if settings.context else ()
  return ("kubectl", *context, f"--namespace={settings.namespace}")
