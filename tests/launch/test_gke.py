"""The JobSet: what it says, and whether Kubernetes and JobSet would take it.

Pods and jobs are checked by the schemas of Kubernetes itself; JobSet's fields
and types by the models that Kubeflow Trainer generates from JobSet's API. These
ignore what they do not know, so nothing may be missing after a round trip. What
JobSet's admission says beyond that (names, actions, immutable fields) is in no
package; the rules that a manifest can break are written down below, from
JobSet's API reference of version 0.10.
"""

import ast
import copy
import re

import kubernetes_validate
import launching
import pydantic
import pytest
import yaml
from kubeflow_trainer_api.models import jobset_v1alpha2_job_set as models

from launch import gke

pytestmark = pytest.mark.filterwarnings("ignore:the load_module")
VERSION = "1.37"
ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


def validate(manifest):
  """Raises what a cluster would say of a JobSet."""
  model = models.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(manifest))
  assert _lacking(manifest, model.to_dict()) == []
  rules = manifest["spec"]["failurePolicy"]["rules"]
  assert {rule["action"] for rule in rules} <= ACTIONS
  subdomain = manifest["spec"]["network"]["subdomain"]
  assert re.fullmatch(LABEL, subdomain)
  for job in manifest["spec"]["replicatedJobs"]:
    last = job["template"]["spec"]["completions"] - 1
    name = f"{manifest['metadata']['name']}-{job['name']}"
    assert re.fullmatch(LABEL, f"{name}-{job['replicas'] - 1}-{last}")
    kubernetes_validate.validate(
      {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": job["template"].get("metadata", {}) | {"name": name},
        "spec": job["template"]["spec"],
      },
      VERSION,
      strict=True,
    )


def _lacking(given, kept, path=""):
  """Paths of what a model did not keep."""
  if isinstance(given, dict):
    return [
      lack
      for key, value in given.items()
      for lack in _lacking(
        value,
        kept.get(key) if isinstance(kept, dict) else None,
        f"{path}.{key}",
      )
    ]
  if isinstance(given, list) and isinstance(kept, list):
    pairs = zip(given, kept + [None] * len(given), strict=False)
    return [lack for one, two in pairs for lack in _lacking(one, two, path)]
  return [] if given == kept else [path]


def jobs_of(manifest):
  return {job["name"]: job for job in manifest["spec"]["replicatedJobs"]}


def pod_of(job):
  return job["template"]["spec"]["template"]["spec"]


def test_two_trainer_slices_and_four_generator_slices():
  manifest = yaml.safe_load(gke.render(launching.plan("gke")))
  validate(manifest)
  jobs = jobs_of(manifest)
  trainer, generator = jobs["trainer"], jobs["generator"]
  assert (trainer["replicas"], generator["replicas"]) == (2, 4)
  for count in ("completions", "parallelism"):
    hosts = [job["template"]["spec"][count] for job in jobs.values()]
    assert hosts == [4, 1]
  for job, topology, chips in ((trainer, "4x4", 4), (generator, "2x4", 8)):
    pod = pod_of(job)
    assert pod["nodeSelector"] == {
      "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
      "cloud.google.com/gke-tpu-topology": topology,
    }
    (main,) = pod["containers"]
    assert main["resources"]["limits"] == {"google.com/tpu": chips}
    assert main["resources"]["requests"] == {"google.com/tpu": chips}

  train = pod_of(trainer)["containers"][0]["command"]
  serve = pod_of(generator)["containers"][0]["command"]
  assert train[:4] == ["python", "-m", "rl_tpu", "train"]
  assert serve[:4] == ["python", "-m", "rl_tpu", "serve"]
  assert "--resume=auto" in train and "--coordinator=auto" in train
  (listed,) = launching.flags_of(train, "--config.remote.addresses")
  assert ast.literal_eval(listed) == tuple(
    f"try1-generator-{i}-0.try1:8470" for i in range(4)
  )
  assert manifest["spec"]["network"]["subdomain"] == "try1"
  assert launching.flags_of(serve, "--port") == ["8470"]
  ports = pod_of(generator)["containers"][0]["ports"]
  assert [port["containerPort"] for port in ports] == [8470]
  ports = pod_of(trainer)["containers"][0]["ports"]
  assert [port["containerPort"] for port in ports] == [8482, 8080]


def environment(job, index):
  """Of a pod of the job with this index, as the kubelet expands it."""
  env = pod_of(job)["containers"][0]["env"]
  values = {"JOB_INDEX": str(index)}
  for variable in env:
    if "value" in variable:
      values[variable["name"]] = re.sub(
        r"\$\((\w+)\)", lambda found: values[found[1]], variable["value"]
      )
  return values


def test_a_trainers_slices_compute_together_and_generators_alone():
  jobs = jobs_of(gke.manifest(launching.plan("gke")))
  second = environment(jobs["trainer"], 1)
  assert second["MEGASCALE_NUM_SLICES"] == "2"
  assert second["MEGASCALE_SLICE_ID"] == "1"
  assert second["MEGASCALE_COORDINATOR_ADDRESS"] == "try1-trainer-0-0.try1"
  third = environment(jobs["generator"], 2)
  assert third["MEGASCALE_NUM_SLICES"] == "1"
  assert third["MEGASCALE_SLICE_ID"] == "0"
  assert third["MEGASCALE_COORDINATOR_ADDRESS"] == "try1-generator-2-0.try1"


def test_a_run_that_is_refused_fails_and_an_eviction_does_not_count():
  manifest = gke.manifest(launching.plan("gke", restarts=7))
  policy = manifest["spec"]["failurePolicy"]
  assert policy["maxRestarts"] == 7
  # A Job's message, as Kubernetes writes it.
  failed = "Container main for pod default/try1-trainer-0-0-x failed with exit "
  failed += "code 2 matching FailJob rule at index 0"
  evicted = "Pod default/try1-trainer-0-0-x has condition DisruptionTarget "
  evicted += "matching FailJob rule at index 1"
  for message, action in (
    (failed, "FailJobSet"),
    (evicted, "RestartJobSetAndIgnoreMaxRestarts"),
  ):
    first = next(
      rule["action"]
      for rule in policy["rules"]
      if any(
        re.fullmatch(pattern, message)
        for pattern in rule.get("onJobFailureMessagePatterns", [".*"])
      )
    )
    assert first == action
  jobs = jobs_of(manifest)
  assert jobs["trainer"]["template"]["spec"]["backoffLimit"] == 0
  assert jobs["generator"]["template"]["spec"]["backoffLimit"] == 7
  assert manifest["spec"]["successPolicy"]["targetReplicatedJobs"] == [
    "trainer"
  ]


@pytest.mark.parametrize(
  "fields",
  [
    {"nfs": None, "bucket": "my-bucket"},
    {"spot": True},
    {"reservation": "res-1", "service_account": "trainer", "queue": "q"},
    {"generators": 1, "flags": ("--config.pretrained=/shared/a 'b' $(c)",)},
  ],
  ids=["bucket", "spot", "reserved", "flags"],
)
def test_every_setting_makes_a_valid_manifest(fields):
  plan = launching.plan("gke", **fields)
  text = gke.render(plan)
  validate(yaml.safe_load(text))
  assert yaml.safe_load(text) == gke.manifest(plan)


def test_the_shared_storage_is_where_the_run_writes():
  manifest = gke.manifest(
    launching.plan("gke", mount="/mnt/all", token_file=None)
  )
  for job in jobs_of(manifest).values():
    pod = pod_of(job)
    (main,) = pod["containers"]
    assert {
      "name": "shared",
      "nfs": {"server": "10.0.0.2", "path": "/share"},
    } in (pod["volumes"])
    assert main["volumeMounts"][0]["mountPath"] == "/mnt/all"
    for name in ("--config.directory", "--config.cache"):
      (path,) = launching.flags_of(main["command"], name)
      assert path.startswith("/mnt/all/runs/")
    assert pod["terminationGracePeriodSeconds"] == 300


def first_job(manifest):
  return manifest["spec"]["replicatedJobs"][0]


def main_of(manifest):
  return pod_of(first_job(manifest))["containers"][0]


@pytest.mark.parametrize(
  ("spoil", "error"),
  [
    (lambda m: m["spec"].update(maxRestarts=3), AssertionError),
    (
      lambda m: m["spec"]["failurePolicy"].update(maxRestarts="3"),
      pydantic.ValidationError,
    ),
    (
      lambda m: m["spec"]["failurePolicy"]["rules"][0].update(action="Fail"),
      AssertionError,
    ),
    (lambda m: first_job(m).update(replica=2), AssertionError),
    (lambda m: pod_of(first_job(m)).update(node="a"), AssertionError),
    (lambda m: main_of(m).update(command="python"), pydantic.ValidationError),
    (
      lambda m: first_job(m)["template"]["spec"].update(
        podFailurePolicy={"rules": [{"action": 1}]}
      ),
      pydantic.ValidationError,
    ),
    (lambda m: m["metadata"].update(name="a" * 60), AssertionError),
  ],
)
def test_the_schemas_see_what_is_wrong(spoil, error):
  manifest = gke.manifest(launching.plan("gke"))
  validate(manifest)
  spoil(manifest)
  with pytest.raises(error):
    validate(manifest)


def test_kubernetes_own_schema_is_asked():
  manifest = gke.manifest(launching.plan("gke"))
  del main_of(manifest)["name"]
  with pytest.raises(kubernetes_validate.ValidationError, match="name"):
    validate(manifest)


def test_pods_of_a_bucket_get_the_sidecar_and_its_driver():
  plan = launching.plan("gke", nfs=None, bucket="my-bucket")
  for job in jobs_of(gke.manifest(plan)).values():
    template = job["template"]["spec"]["template"]
    annotations = template["metadata"]["annotations"]
    assert annotations == {"gke-gcsfuse/volumes": "true"}
    volume = template["spec"]["volumes"][0]["csi"]
    assert volume["driver"] == "gcsfuse.csi.storage.gke.io"
    assert volume["volumeAttributes"]["bucketName"] == "my-bucket"
