"""The command `compile`: what a config would take on TPUs, before there is one.

The learner's update and proximal forward pass, its critic's update and values,
the generator's prefill (of packed rows, where it packs them), the continuation
of shared prefixes and decoding are compiled for the topology by the TPU's own
compiler, on a CPU. See `estimate` for what the numbers are worth.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from rl_tpu import parts, sharding
from rl_tpu.aot import answers, flops, kernels, programs
from rl_tpu.aot.estimate import GIB, Estimate, Work
from rl_tpu.optimizer import HOST_MEMORY
from rl_tpu.topology import Topology

_SHOWN = 10
"""Most lines of a list."""

_MODEL = f"""\
Estimates for TPUs, made on a CPU. Compute: the compiler's cycles; attention's
kernel at the peak that its head size allows; grouped products of experts, all
alike busy, at {flops.GROUPED:.2f} of the peak (tiles that two experts share \
counted twice)
or reading the weights of those touched; gathers and scatters at HBM's
bandwidth; sorts left out. Good for products, pessimistic for what waits for
memory. Decoding's kernels are modelled, not the compiler's: \
{kernels.SHARE:.0%} of HBM's
bandwidth and {kernels.WAIT * 1e6:g} us a page, with every page in use. \
Network: rings along
each axis of the torus that a group spans, one collective after the other; how
much hides behind compute is not known."""


def run(
  config: parts.Config,
  show: Callable[[str], None],
  note: Callable[[str], None],
) -> dict[str, Any]:
  """Compiles a config's programs and shows what they take.

  Args:
    config: of the run; `config.compile` says where it would live.
    show: gets the report, line by line.
    note: is told what is going on.

  Returns:
    The headline figures: `fits`; `hbm_gib` and `headroom` of the program that
    leaves least; `compute_seconds_estimated`, `compute_seconds_ideal`,
    `estimated_mfu` (ideal / estimated), `allowed_mfu` (at the compiler's rate
    for large products and kernels), `collective_bytes` (that a chip sends)
    and `collective_seconds` of the update; `tokens_per_second` that it consumes
    and `decode_tokens_per_second`, where no collective hides behind compute;
    `decode_step_seconds` and `decode_times_roofline`; the same by program. What
    cannot be right is null.

  Raises:
    ConfigError: there is no such topology, or the config's meshes are not of
      its size, or do not divide weights or rows.
  """
  cache = pathlib.Path(config.cache) / "compiled_for_tpus"
  sides = [_trainer(config), _generator(config)]
  estimates: dict[str, Estimate] = {}
  show(_MODEL)
  for topology, mesh, found in sides:
    for name, (traced, work) in found.items():
      compiled = programs.compile_cached(
        traced, mesh, cache, lambda line, name=name: note(f"{name}: {line}")
      )
      estimate = Estimate(
        name, work, compiled, topology, list(mesh.devices.flat)
      )
      estimates[name] = estimate
      for line in lines(estimate):
        show(line)
  found = figures(config, estimates)
  answers.write(config, found)
  return found


_Side = tuple[
  Topology, jax.sharding.Mesh, dict[str, tuple[jax.stages.Traced, Work]]
]


def _trainer(config: parts.Config) -> _Side:
  """The learner's programs."""
  topology = config.compile.trainer()
  mesh = programs.mesh_for(
    "config.devices.trainer", config.devices.trainer, topology
  )
  learner, batch = programs.trainer(config, mesh)
  rows, length = batch.tokens.shape
  traced = learner.traced(batch)
  state = learner.abstract_state()
  weights, optimizer = _bytes(state.params), _bytes(state.optimizer)
  values, moments = 0, 0
  if state.critic is not None:
    values, moments = map(_bytes, (state.critic.params, state.critic.optimizer))
  reference = weights if "reference_logp" in learner.requires else 0
  remedies = (
    f"raise config.devices.trainer.fsdp ({config.devices.trainer.fsdp}) or "
    f"tensor ({config.devices.trainer.tensor}), or, where a row is too long "
    f"for a device, sequence ({config.devices.trainer.sequence}); lower "
    f"config.learner.microbatch_rows ({config.learner.microbatch_rows}) to "
    "data * fsdp * expert; config.model.remat "
    f"({config.model.remat!r}) = 'full'; lower "
    f"config.learner.logit_chunk ({config.learner.logit_chunk}); "
    f"config.learner.moments ({config.learner.moments!r}) = 'host'"
  )
  rows_of = {"update": rows // config.learner.minibatches}
  passes = {"update": 3, "critic_update": 3}
  policy = {"weights": weights, "optimizer": optimizer}
  critics = {"critic": values, "critic's optimizer": moments}
  others = {"reference policy": reference}
  held = {
    "proximal": {"weights": weights} | others,
    "values": {"critic": values},
    "critic_update": critics,
    "update": policy,
  }
  beside = {
    "proximal": {"optimizer": optimizer} | critics,
    "values": {"critic's optimizer": moments} | policy | others,
    "critic_update": policy | others,
    "update": others | critics,
  }
  moved = {"optimizer": state.optimizer}
  if state.critic is not None:
    moved["critic's optimizer"] = state.critic.optimizer
  on_host = {name: _bytes(tree, on_host=True) for name, tree in moved.items()}
  found = {}
  for name, one in traced.items():
    own = rows_of.get(name, rows)
    head = name in ("proximal", "update")
    forward = flops.forward(config.model, own, length, head) / topology.size
    work = Work(
      what=f"{own} rows of {length} tokens",
      tokens=own * length,
      flops=flops.traced(one.jaxpr.jaxpr) / topology.size,
      ideal_flops=passes.get(name, 1) * forward,
      ideal_attention=passes.get(name, 1)
      * flops.attention(config.model, own, length)
      / topology.size,
      experts=config.model.num_experts,
      held=held[name],
      beside=beside[name],
      on_host=on_host,
      remedies=remedies,
    )
    found[name] = (one, work)
  return topology, mesh, found


def _generator(config: parts.Config) -> _Side:
  """The generator's programs."""
  topology = config.compile.generator()
  shape = config.devices.generator
  mesh = programs.mesh_for("config.devices.generator", shape, topology)
  engine = parts.make_engine(config, mesh)
  settings, model = config.engine, config.model
  traced = engine.traced()
  weights, state = engine.abstract_arguments()
  held = {"weights": _bytes(weights), "cache": _bytes(state)}
  policy = engine.policy
  published = sharding.placed(
    policy.abstract_params(), policy.param_shardings(mesh)
  )
  beside = {
    "next weights": held["weights"],
    "as they are published": _bytes(published),
  }
  # A step reads the weights of its share of heads and hidden units, as they are
  # used, those of its experts that some slot chose, and all of the cache.
  shared, experts = flops.weights(model)
  chosen = settings.slots // (shape.data * shape.fsdp) * model.experts_per_token
  experts *= flops.touched(model.num_experts, chosen) / shape.expert
  used = (shared + experts) * jnp.dtype(model.compute_dtype).itemsize
  read = used / shape.tensor + _bytes(state)
  remedies = (
    f"lower config.engine.slots ({settings.slots}) or context_length "
    f"({settings.context_length}); raise config.devices.generator.tensor "
    f"({shape.tensor})"
  )
  decode = Work(
    what=f"{settings.slots} slots, {settings.steps_per_dispatch} steps, "
    "sampled without filters",
    cheap_branches=True,
    experts=model.num_experts,
    tokens=settings.slots * settings.steps_per_dispatch,
    flops=flops.traced(traced["decode"].jaxpr.jaxpr) / topology.size,
    least_bytes=read * settings.steps_per_dispatch,
    held=held,
    beside=beside,
    remedies=remedies,
  )
  found = {}
  for name, one in traced.items():
    work = decode
    if name != "decode":
      packs = settings.prompts_per_row if name == "prefill" else 1
      work = _prefill(config, packs, engine.batches[-1], one, decode)
    found[name] = (one, work)
  return topology, mesh, found


def _prefill(
  config: parts.Config,
  packs: int,
  rows: int,
  traced: jax.stages.Traced,
  decode: Work,
) -> Work:
  """Of full rows of so many prompts, all alike long; `decode` of the side."""
  settings, model = config.engine, config.model
  length = settings.prefill_buckets[-1]
  prompts, each = rows * packs, length // packs
  chips = config.compile.generator().size
  return dataclasses.replace(
    decode,
    what=f"{prompts} prompts of {each} tokens in rows of {length}",
    cheap_branches=False,
    most_turns=rows,
    tokens=rows * length,
    flops=flops.traced(traced.jaxpr.jaxpr) / chips,
    least_bytes=0.0,
    ideal_flops=flops.forward(model, prompts, each, head=False) / chips,
    ideal_attention=flops.attention(model, prompts, each) / chips,
    remedies=f"{decode.remedies}; lower the last of prefill_batches",
  )


def _bytes(tree: Any, on_host: bool = False) -> int:
  """Bytes of a placed abstract tree on one device, or on its host."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
    if (leaf.sharding.memory_kind == HOST_MEMORY) == on_host
  )


def lines(estimate: Estimate) -> Iterator[str]:
  """The report of one program."""
  work, topology = estimate.work, estimate.topology
  yield ""
  yield f"{estimate.name}: {work.what}, on {topology.size} chips of {topology}"
  if estimate.compiled.refused is not None:
    yield f"  DOES NOT FIT: {estimate.compiled.refused}"
    yield f"  to make it fit: {work.remedies}"
    return
  yield from _memory(estimate)
  if not estimate.fits:
    yield f"  DOES NOT FIT; to make it fit: {work.remedies}"
  yield from _time(estimate)
  for row in estimate.traffic[:_SHOWN]:
    yield (
      f"    {row.kind} among {row.members}: {row.count} times, "
      f"{row.bytes / 1e9:.3g} GB a chip, {_ms(row.seconds)}"
    )
  yield from _dearest(estimate)


def _memory(estimate: Estimate) -> Iterator[str]:
  chip, memory = estimate.topology.chip, estimate.compiled.memory
  arguments = memory["arguments"] - sum(estimate.work.held.values())
  results = memory["results"] - memory["donated"]
  sizes = {
    **estimate.work.held,
    "other arguments": arguments,
    "new results": results,
    "temporary": memory["temporary"],
    "code": memory["code"],
    **{f"beside it: {k}": n for k, n in estimate.work.beside.items()},
  }
  yield (
    f"  HBM {estimate.hbm / GIB:.2f} of {chip.memory / GIB:.2f} GiB a chip, "
    f"headroom {estimate.headroom:.1%}"
  )
  for name, size in sizes.items():
    if abs(size) >= GIB / 200:
      yield f"    {name} {size / GIB:.2f}"
  for name, size in estimate.work.on_host.items():
    if size:
      yield f"    saved, on the chip's host: {name} {size / GIB:.2f}"


def _time(estimate: Estimate) -> Iterator[str]:
  seconds, ideal = estimate.seconds, estimate.ideal_seconds
  yield f"  operations {estimate.flops:.4g} a chip"
  if seconds is None:
    yield "  compute: no estimate, for " + "; ".join(estimate.doubts)
  elif estimate.work.ideal_flops:
    yield (
      f"  compute {_ms(seconds)} estimated, {_ms(ideal)} ideal: estimated MFU "
      f"{ideal / seconds:.2f} of compute alone, "
      f"{ideal / (seconds + estimate.network_seconds):.2f} with no collective "
      "hidden"
    )
    allowed = estimate.allowed_seconds
    yield (
      "  at the compiler's rate for large products and these kernels "
      f"{_ms(allowed)}: MFU {ideal / allowed:.2f}, of which "
      f"{allowed / seconds:.2f} is reached"
    )
  else:
    yield (
      f"  compute {_ms(seconds)} estimated; reading HBM once takes "
      f"{_ms(ideal)}: {seconds / ideal:.2f} times that"
    )
  if estimate.tokens_per_second is not None:
    yield f"  {estimate.tokens_per_second:,.0f} tokens a second"
  total = sum(row.bytes for row in estimate.traffic)
  yield (
    f"  collectives {total / 1e9:.3g} GB a chip, "
    f"{_ms(estimate.network_seconds)}"
  )


def _dearest(estimate: Estimate) -> Iterator[str]:
  """What takes most of the compute."""
  clock = estimate.topology.chip.clock
  costs = [
    (op.cycles * times / clock, times, op) for op, times in estimate.program.ops
  ] + [
    (estimate.kernel_seconds(op) * times, times, op)
    for op, times in estimate.program.kernels
  ]
  total = sum(seconds for seconds, _, _ in costs)
  yield "  most of the compute:"
  for seconds, times, op in sorted(costs, key=lambda c: -c[0])[:_SHOWN]:
    yield (
      f"    {seconds / total:5.1%} {_ms(seconds)} in {times} x {op.name} "
      f"({op.source})"
    )


def _ms(seconds: float) -> str:
  return f"{seconds * 1e3:.4g} ms"


def figures(
  config: parts.Config, estimates: dict[str, Estimate]
) -> dict[str, Any]:
  """The headline figures; see `run`."""
  update, decode = estimates["update"], estimates["decode"]
  known = [e for e in estimates.values() if e.compiled.refused is None]
  tightest = min(known, key=lambda e: e.headroom, default=None)
  steps = config.engine.steps_per_dispatch
  return {
    "fits": all(estimate.fits for estimate in estimates.values()),
    "hbm_gib": tightest and tightest.hbm / GIB,
    "headroom": tightest and tightest.headroom,
    "compute_seconds_estimated": update.seconds,
    "compute_seconds_ideal": update.ideal_seconds,
    "estimated_mfu": update.seconds and update.ideal_seconds / update.seconds,
    "allowed_mfu": update.seconds
    and update.ideal_seconds / update.allowed_seconds,
    "collective_bytes": sum(row.bytes for row in update.traffic),
    "collective_seconds": update.network_seconds,
    "tokens_per_second": update.tokens_per_second,
    "decode_tokens_per_second": decode.tokens_per_second,
    "decode_step_seconds": decode.seconds and decode.seconds / steps,
    "decode_times_roofline": decode.seconds
    and decode.seconds / decode.ideal_seconds,
    "programs": {name: _figures(e) for name, e in estimates.items()},
  }


def _figures(estimate: Estimate) -> dict[str, Any]:
  known = estimate.compiled.refused is None
  return {
    "fits": estimate.fits,
    "hbm_gib": estimate.hbm / GIB if known else None,
    "host_gib": sum(estimate.work.on_host.values()) / GIB,
    "headroom": estimate.headroom if known else None,
    "compute_seconds_estimated": estimate.seconds,
    "compute_seconds_ideal": estimate.ideal_seconds,
    "collective_bytes": sum(row.bytes for row in estimate.traffic),
    "collective_seconds": estimate.network_seconds,
  }
