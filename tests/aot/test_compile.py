import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from test_hlo import LOOPS

from rl_tpu import __main__ as command_line
from rl_tpu import sharding
from rl_tpu.aot import programs
from rl_tpu.aot.estimate import Estimate, Work
from rl_tpu.aot.programs import Compiled
from rl_tpu.config import ConfigError
from rl_tpu.topology import CHIPS, OPTIONS, Topology

POD = str(pathlib.Path(__file__).with_name("pod.py"))
MEMORY = dict.fromkeys(
  ("arguments", "results", "donated", "temporary", "code"), 0
)


command_line._describe_tpus()  # the compiler is loaded once in a process


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("compiled")


def compile_pod(cache, *flags, pod=POD):
  command = [sys.executable, "-m", "rl_tpu", "compile", f"--config={pod}"]
  return subprocess.run(
    [*command, f"--config.cache={cache}", *flags],
    capture_output=True,
    text=True,
    timeout=600,
  )


def headline(done):
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_program_of_a_small_run_is_compiled_for_its_topology(cache):
  """Splash, shards over fsdp and tensor, rows of several prompts: 30 CPU s."""
  done = compile_pod(cache)
  assert done.returncode == 0, done.stderr
  figures = headline(done)
  assert figures["fits"]
  assert set(figures["programs"]) == {
    *("proximal", "update", "prefill", "extend", "decode"),
  }
  for program in figures["programs"].values():
    ideal = program["compute_seconds_ideal"]
    assert 0 < ideal < program["compute_seconds_estimated"]
    assert program["collective_bytes"] > 0
  assert 0 < figures["estimated_mfu"] < 1
  assert "x paged_attention" in done.stdout
  assert "8 prompts of 64 tokens in rows of 256" in done.stdout
  moved = {
    name: found["collective_bytes"]
    for name, found in figures["programs"].items()
  }
  # Packed rows are exchanged once a layer, not once for each sequence.
  assert moved["prefill"] < 2 * moved["extend"]
  assert done.stderr.count("compiling") == 5

  again = compile_pod(cache)
  assert again.stdout == done.stdout
  assert again.stderr.count("taken from") == 5
  assert "compiling" not in again.stderr


@pytest.mark.slow
def test_a_critic_and_experts_are_compiled_and_have_a_time(cache):
  """Grouped products, experts and tokens that travel; about 60 CPU seconds."""
  done = compile_pod(cache, pod=POD.replace("pod.py", "pod_of_experts.py"))
  assert done.returncode == 0, done.stderr
  found = headline(done)["programs"]
  assert set(found) == {
    "values",
    "critic_update",
    "update",
    "prefill",
    "extend",
    "decode",
  }
  for name, program in found.items():
    ideal = program["compute_seconds_ideal"]
    assert program["compute_seconds_estimated"] is not None, name
    assert 0 < ideal < program["compute_seconds_estimated"], name
  report = done.stdout.split("\n\n")
  update = next(part for part in report if part.startswith("update:"))
  assert "all-gather among 2" in update


@pytest.mark.slow
def test_what_does_not_fit_exits_non_zero_and_says_what_to_change(tmp_path):
  done = compile_pod(tmp_path, "--config.model.d_ff=8000000")
  assert done.returncode == 1, done.stderr
  figures = headline(done)
  assert not figures["fits"] and figures["estimated_mfu"] is None
  assert not any(program["fits"] for program in figures["programs"].values())
  assert "DOES NOT FIT: Ran out of memory" in done.stdout
  assert "raise config.devices.trainer.fsdp (2)" in done.stdout
  assert "lower config.engine.slots (8)" in done.stdout


def compiled_update(cache, *flags):
  """The compiler's answer for the update of a changed small run."""
  config = command_line._read_config(["rl_tpu", f"--config={POD}", *flags])
  mesh = programs.mesh_for(
    "config.devices.trainer", config.devices.trainer, config.compile.trainer()
  )
  learner, batch = programs.trainer(config, mesh)
  update = learner.traced(batch)["update"]
  return programs.compile_cached(update, mesh, cache, lambda line: None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_four_chips_that_share_a_row_hold_a_part_of_its_activations_each(
  cache,
):
  """Against a row each; splash with its queries split. About 60 CPU seconds."""

  def temporary(shape, rows):
    devices = {"fsdp": 1, "sequence": 1, "tensor": 1} | shape
    done = compiled_update(
      cache,
      "--config.model.num_layers=8",
      "--config.model.remat=full",
      "--config.learner.row_length=16384",
      f"--config.learner.microbatch_rows={rows}",
      *(f"--config.devices.trainer.{a}={n}" for a, n in devices.items()),
    )
    assert not done.refused and "custom-call" in done.text
    return done.memory["temporary"]

  assert temporary({"sequence": 4}, 1) < 0.5 * temporary({"fsdp": 4}, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_memory_of_the_update_does_not_grow_with_vocabulary_times_length(
  cache,
):
  def held(length):
    flags = ("vocab_size=32768", "remat=full")
    return compiled_update(
      cache,
      *(f"--config.model.{flag}" for flag in flags),
      f"--config.learner.row_length={length}",
    ).hbm

  rows, shards = 2, 2  # of a microbatch, and of the vocabulary, on a chip
  logits = 4 * rows * 32768 // shards * (2048 - 512)
  assert held(2048) - held(512) < logits / 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_moments_on_hosts_leave_their_bytes_of_a_chip_to_activations(cache):
  def held(moments):
    return compiled_update(
      *(cache, "--config.learner.row_length=2048"),
      f"--config.learner.moments={moments}",
    )

  on_chip, on_host = held("device"), held("host")
  moments = on_chip.memory["arguments"] - on_host.memory["arguments"]
  weights = 2 * 1024 * 256 // 4  # at the least
  assert moments > 8 * weights
  assert on_chip.hbm - on_host.hbm > moments / 2


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (["--topology=v9:2x2"], ["v9:2x2", "v5e", "v5p"]),
    (["--topology=v5p:2x2"], ["v5p:2x2", "3 dimensions"]),
    (
      ["--topology=v5e:4x4"],
      ["config.devices.trainer", "16 chips", "'fsdp': 2"],
    ),
    (["--topology=v5e:2x2", "--slices=2"], ["v5e:2x2 x 2", "8 chips"]),
    (["--topology=v5e:2x2", "--slices=0"], ["slices is 0"]),
    (
      ["--generator_topology=v5e:4x4"],
      ["config.devices.generator", "16 chips"],
    ),
    (["--config.model.d_ff=511"], ["'mlp'", "511", "tensor"]),
    (["--config.learner.microbatch_rows=3"], ["microbatch_rows is 3"]),
  ],
)
def test_what_cannot_be_compiled_is_refused_before_anything_is(
  flags, words, capsys, tmp_path
):
  arguments = [f"--config={POD}", f"--config.cache={tmp_path}", *flags]
  assert command_line.main(["rl_tpu", "compile", *arguments]) == 2
  error = capsys.readouterr().err
  assert all(word in error for word in words), error
  assert "compiling" not in error


def test_a_run_gives_the_compiler_the_same_options_before_its_own(monkeypatch):
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--mine=1")
  command_line._as_compiled()
  *ours, mine = os.environ["LIBTPU_INIT_ARGS"].split()
  assert mine == "--mine=1"
  assert ours == [f"--{name}={value}" for name, value in OPTIONS.items()]


def test_a_topology_that_no_slice_has_is_refused_by_its_name():
  with pytest.raises(ConfigError, match="topology 'v5e:3x5'"):
    programs.devices(Topology(name="v5e:3x5"))


def test_the_chips_of_a_mesh_are_those_of_the_topology():
  mesh = programs.mesh_for(
    "config.devices.trainer",
    sharding.MeshShape(data=2, fsdp=4),
    Topology(name="v5e:2x4"),
  )
  assert mesh.devices.flat[0].device_kind == "TPU v5 lite"
  assert len({tuple(d.coords) for d in mesh.devices.flat}) == 8


def estimate(text, **changes):
  work = Work(
    what="", tokens=1, flops=0.0, held={}, remedies="buy more", **changes
  )
  compiled = Compiled(text=text, memory=MEMORY)
  return Estimate("update", work, compiled, Topology(name="v5e:2x2"), [])


def test_an_mfu_above_1_is_called_wrong_and_not_printed():
  text = LOOPS.replace("FIRST", "0")
  seconds = estimate(text).seconds
  assert seconds == pytest.approx(1507 / 1.5e9)
  possible = estimate(text, ideal_flops=0.5 * seconds * 197e12)
  assert possible.seconds == seconds
  impossible = estimate(text, ideal_flops=2 * seconds * 197e12)
  assert impossible.seconds is None
  assert impossible.tokens_per_second is None
  assert "MFU above 1" in impossible.doubts[0]


def test_what_the_compiler_allows_is_products_at_its_rate_and_kernels():
  text = LOOPS.replace("FIRST", "0")
  sizes = "bf16[4,256,128]{2,1,0}"
  kernel = (
    "  %splash_mha_fwd.1 = f32[8]{0} custom-call(%p.5), "
    'custom_call_target="tpu_custom_call", '
    f"operand_layout_constraints={{{sizes}, {sizes}}}\n  %multiply.5"
  )
  text = text.replace("  %multiply.5", kernel)
  operations = {"ideal_flops": 5e9, "ideal_attention": 1e9}
  products = 4e9 / (CHIPS["v5e"].product * 197e12)
  attention = 2 * 4 * 256**2 * 128 * 2 / 2 / 197e12
  found = estimate(text, **operations)
  assert found.allowed_seconds == pytest.approx(products + attention)


def test_attention_without_a_kernel_is_allowed_the_time_of_products():
  text = LOOPS.replace("FIRST", "0")
  found = estimate(text, ideal_flops=5e9, ideal_attention=1e9)
  allowed = 5e9 / (CHIPS["v5e"].product * 197e12)
  assert found.allowed_seconds == pytest.approx(allowed)


def test_cycles_that_the_compiler_cannot_mean_leave_no_estimate():
  text = LOOPS.replace("FIRST", "0").replace('"100"', '"258258258258258"')
  found = estimate(text)
  assert found.seconds is None
  assert "add.2 2.58e+14 cycles" in found.doubts[0]


def test_a_loop_of_unknown_length_leaves_no_estimate():
  text = LOOPS.replace("FIRST", "0").replace("direction=LT", "direction=NE")
  found = estimate(text)
  assert found.seconds is None
  assert "while.5" in found.doubts[0]


def test_the_network_is_as_fast_as_the_axes_that_a_group_spans():
  shape = (4, 4, 4)
  places = list(np.ndindex(shape))
  devices = [SimpleNamespace(coords=list(place)) for place in places]
  number = {place: n for n, place in enumerate(places)}
  v5p = Topology(name="v5p:4x4x4")
  line = np.array([[number[x, 0, 0] for x in range(4)]])
  plane = np.array([[number[x, y, 0] for x in range(4) for y in range(4)]])
  assert v5p.speed(devices, line) == 2 * 100e9
  assert v5p.speed(devices, plane) == 4 * 100e9
  flat = [SimpleNamespace(coords=[x, y, 0]) for x in range(4) for y in range(4)]
  # Only 16 chips in a line make a ring of v5e.
  assert Topology(name="v5e:4x4").speed(flat, np.arange(4)[None]) == 50e9
  assert v5p.speed(devices, np.array([[3, 3]])) == np.inf


def test_what_crosses_slices_goes_through_the_data_centre_network():
  devices = [SimpleNamespace(coords=[0, 0, 0], slice_index=n) for n in range(2)]
  two = Topology(name="v5e:2x2", slices=2)
  assert two.speed(devices, np.array([[0, 1]])) == 3.125e9
