"""Commands that are sent to gcloud, xpk and kubectl, against their references.

Neither gcloud nor a cluster is here: `published_flags.json` has what the tools
document, with source and version, and every flag of ours must be among it.
"""

import ast
import json
import pathlib
import re
import shlex

import launching
import pytest
import yaml

from launch import backends

pytestmark = pytest.mark.filterwarnings("ignore:the load_module")
PUBLISHED = json.loads(
  (pathlib.Path(__file__).parent / "published_flags.json").read_text()
)
RUNS = {
  "gke": {},
  "tpu_vm": {},
  "xpk": {"run": launching.SMALL},
  "pathways": {
    "run": (
      launching.POD,
      "--generator_topology=v5e:4x4",
      "--config.devices.generator.data=4",
    ),
    "generators": 1,
  },
}
"""What is launched where; generators of v5e have two hosts with xpk."""
CHANGES = [
  {},
  {"spot": True, "context": "my-context"},
  {"reservation": "res-1", "service_account": "someone@my-project.iam"},
]


def steps_of(name, **fields):
  """All that one backend ever sends for a run."""
  backend = backends.CLOUDS[name]
  plan = launching.plan(name, **(RUNS[name] | fields))
  return [
    *backend.start(plan),
    backend.status(plan),
    *backend.logs(plan),
    *backend.stop(plan),
  ]


@pytest.mark.parametrize(
  "changed", CHANGES, ids=lambda c: "".join(c) or "plain"
)
@pytest.mark.parametrize("name", backends.CLOUDS)
def test_every_flag_is_one_that_the_tool_documents(name, changed):
  seen = set()
  for step in steps_of(name, **changed):
    words = [word for word in step.argv if not word.startswith("--")]
    command = max(
      (known for known in PUBLISHED if " ".join(words).startswith(known)),
      key=len,
    )
    flags = {w.partition("=")[0] for w in step.argv if w.startswith("--")}
    assert flags <= set(PUBLISHED[command]), command
    seen.add(command)
  assert len(seen) >= 3


@pytest.mark.parametrize("name", backends.CLOUDS)
def test_nothing_is_sent_by_making_the_steps(name, monkeypatch):
  monkeypatch.setattr("subprocess.Popen", None)
  assert steps_of(name)


def test_queued_resources_of_two_trainer_slices_and_four_generators():
  plan = launching.plan("tpu_vm")
  steps = backends.CLOUDS["tpu_vm"].start(plan)
  by_name = {step.argv[5]: step for step in steps}
  assert set(by_name) == {
    "try1-trainer",
    *(f"try1-generator-{i}" for i in range(4)),
  }
  trainer = by_name["try1-trainer"].argv
  assert "--node-count=2" in trainer and "--node-prefix=try1-trainer" in trainer
  assert "--accelerator-type=v5litepod-16" in trainer
  third = by_name["try1-generator-2"].argv
  assert "--node-id=try1-generator-2" in third
  assert "--accelerator-type=v5litepod-8" in third
  for step in steps:
    assert "--runtime-version=v2-alpha-tpuv5-lite" in step.argv
    assert "--zone=us-east5-a" in step.argv
    ((path, script),) = step.files
    assert f"--metadata-from-file=startup-script={path}" in step.argv
    assert script.startswith("#!/usr/bin/env bash\n")


def test_a_slice_of_three_dimensions_is_asked_for_by_its_shape():
  plan = launching.plan("tpu_vm", run=launching.SMALL)
  shapes = [
    launching.flags_of(step.argv, "--topology")
    for step in backends.CLOUDS["tpu_vm"].start(plan)
  ]
  assert shapes == [["2x2x1"]] * 4 + [["4x4x4"]]


def test_workloads_of_xpk_find_each_other_and_take_sigterm():
  plan = launching.plan("xpk", run=launching.SMALL)
  *generators, trainer = backends.CLOUDS["xpk"].start(plan)
  assert launching.flags_of(trainer.argv, "--tpu-type") == ["v5p-4x4x4"]
  (command,) = launching.flags_of(trainer.argv, "--command")
  words = shlex.split(command)
  assert words[:5] == ["exec", "python", "-m", "rl_tpu", "train"]
  assert "--resume=auto" in words and "--coordinator=auto" in words
  (listed,) = launching.flags_of(words, "--config.remote.addresses")
  names = [launching.flags_of(g.argv, "--workload")[0] for g in generators]
  assert ast.literal_eval(listed) == tuple(
    f"{name}-slice-job-0-0.{name}:8470" for name in names
  )
  for name in names:
    # xpk's own rule.
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 40


def test_one_process_has_trainer_and_generator_under_pathways():
  plan = launching.plan("pathways", **RUNS["pathways"])
  (step,) = backends.CLOUDS["pathways"].start(plan)
  assert launching.flags_of(step.argv, "--num-slices") == ["2"]
  (command,) = launching.flags_of(step.argv, "--command")
  assert "launch.under_pathways train" in command
  assert "--coordinator" not in command and "remote" not in command
  assert "--resume=auto" in command


@pytest.mark.parametrize("name", ["gke", "tpu_vm", "xpk"])
def test_values_with_quotes_and_dollars_arrive_as_they_are(name):
  odd = '--config.pretrained=/shared/it\'s "a" $(touch x) {b}'
  plan = launching.plan(name, **RUNS[name], flags=(odd,))
  for step in backends.CLOUDS[name].start(plan):
    if name == "gke":
      assert str(yaml.safe_load(step.stdin)).count(repr(odd)) == 2
      # The kubelet expands $(NAME), and leaves it where there is no such NAME.
    elif name == "xpk":
      (command,) = launching.flags_of(step.argv, "--command")
      assert odd in shlex.split(command)
    else:
      ((_, script),) = step.files
      (line,) = re.findall(r"^command=\((.*)\)$", script, re.MULTILINE)
      assert odd in shlex.split(line)
