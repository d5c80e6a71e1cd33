"""The parts of a run, made from its config; nothing runs here.

`Config` is everything that a run depends on. The functions below turn it into
meshes, task, generator and actor, for the training loop and for the commands
that need only some of them.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np

from rl_tpu import actor as actors
from rl_tpu import (
  algorithms,
  attempts,
  buffer,
  data,
  envs,
  evaluate,
  history,
  learner,
  metrics,
  monitoring,
  ownership,
  processes,
  schedules,
  sft,
  sharding,
  staleness,
  topology,
  tracing,
)
from rl_tpu import critic as critics
from rl_tpu import transport as transports
from rl_tpu.config import Choice, ConfigError, differences, to_json
from rl_tpu.episode import Generator
from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine as engines
from rl_tpu.generation import fleet, roster
from rl_tpu.generation import server as servers
from rl_tpu.models import huggingface, quantization, tokenizer, transformer
from rl_tpu.rewards import shaping as shapes
from rl_tpu.types import Sampling
from rl_tpu.view import View
from rl_tpu.virtual import config as virtual

_PLACES = (
  *("directory", "cache", "resume", "distributed", "remote", "transport"),
  *("serve", "export", "evaluate", "compile", "simulate"),
  *("logging", "trace"),
)
"""Fields that say where a run lives and goes to, not what it computes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
  """Meshes of the two sides; in async training they share no device."""

  trainer: sharding.MeshShape = dataclasses.field(
    default_factory=sharding.MeshShape
  )
  """The learner's mesh: the first devices."""
  generator: sharding.MeshShape = dataclasses.field(
    default_factory=sharding.MeshShape
  )
  """The generator's mesh: the devices after the trainer's (async), or the
  first ones too (sync and lockstep). Where generators have processes of their
  own, that of each of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Everything a run depends on."""

  name: str
  """Of the experiment; part of the default directory."""
  directory: str = "runs/{name}/{schedule}-seed{seed}"
  """Where the run lives; names in braces are fields of this config."""
  cache: str = "runs/cache"
  """Prepared data, warm starts and compiled programs, shared by runs."""
  seed: int = 0
  """Of weights, prompt order, sampling and minibatches, in [0, 2**31)."""
  batches: int = 50
  """Batches to train over the whole run, >= 1."""
  groups_per_batch: int = 32
  """Prompts in a batch, >= 1 (AReaL: 512)."""
  group_size: int = 8
  """Trajectories of one prompt, >= 1 (AReaL: 16)."""
  schedule: str = "async"
  """`async`, `sync` (= lockstep(0)) or `lockstep(n)`; see schedules.py."""
  max_staleness: int | None = 2
  """Versions that a consumed token may lag, >= 0 (AReaL: 8 math, 4 code); None
  is no limit. A serial schedule has its lag here instead, and what the
  generator's refresh period adds."""
  on_stale: Literal["refuse", "mask_tokens", "allow"] = "refuse"
  """What happens to what turns out staler when it is consumed."""
  max_running_groups: int | None = None
  """Most groups in flight, >= 1; None: as many as staleness admits."""
  max_turns: int = 1
  """Most actions of one episode, >= 1."""
  limits: envs.Limits = dataclasses.field(default_factory=envs.Limits)
  """What is taken from an environment: time, length of observations."""
  shaping: shapes.Config = dataclasses.field(default_factory=shapes.Config)
  """What is done to rewards before they are trained on; evaluations are not
  touched, and the log has `env_unshaped_reward` beside `reward`."""
  interruption: Literal["recompute", "keep", "drain"] = "recompute"
  """What new weights do to running sequences; see generation/driver.py."""
  task: Choice = dataclasses.field(metadata={"find": envs.get})
  """Questions and their judge, by name."""
  algorithm: Choice = dataclasses.field(metadata={"find": algorithms.get})
  """The loss, by name."""
  model: transformer.Config
  """Sizes of the policy."""
  pretrained: str | None = None
  """Folder in Hugging Face's format whose weights and tokenizer the run starts
  from; `model` must be its `huggingface.read_config`, but for compute dtype,
  remat and unroll."""
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  """How training tokens are drawn; stop ids are the tokenizer's if empty."""
  learner: learner.Config
  """How a batch becomes optimizer steps."""
  engine: engines.Config
  """Sizes of the generator."""
  devices: Devices = dataclasses.field(default_factory=Devices)
  """Meshes."""
  critic: critics.Config = dataclasses.field(default_factory=critics.Config)
  """Of algorithms that have a critic (sao, vapo); the others leave it alone."""
  warm_start: sft.Config
  """The supervised phase that the run starts from."""
  evaluation: evaluate.Config = dataclasses.field(
    default_factory=evaluate.Config
  )
  """Held-out questions."""
  checkpoint_every: int = 10
  """Batches between checkpoints, >= 1; the last batch has one anyway."""
  checkpoints_kept: int = 2
  """Newest checkpoints that stay on disk, >= 1."""
  resume: ownership.Resume = "auto"
  """`auto` goes on from the newest checkpoint if the directory has one, `never`
  refuses to, `must` refuses to begin anew."""
  distributed: processes.Config = dataclasses.field(
    default_factory=processes.Config
  )
  """Of a trainer of several processes."""
  remote: roster.Config = dataclasses.field(default_factory=roster.Config)
  """Generators that have processes of their own (`serve`, with
  serve.weights='awaited'); where any is named, all devices of the trainer's
  train, and the schedule must be async. Without any the run has a generator of
  its own."""
  transport: transports.Config = dataclasses.field(
    default_factory=transports.Config
  )
  """How weights reach them."""
  logging: monitoring.Config = dataclasses.field(
    default_factory=monitoring.Config
  )
  """Who is told of each batch, besides the run's directory."""
  trace: tracing.Config = dataclasses.field(default_factory=tracing.Config)
  """Batches that a profiler watches."""
  serve: servers.Config = dataclasses.field(default_factory=servers.Config)
  """Of the command `serve`: address and limits."""
  export: huggingface.Export = dataclasses.field(
    default_factory=huggingface.Export
  )
  """Of the command `export`."""
  evaluate: attempts.Config = dataclasses.field(default_factory=attempts.Config)
  """Of the command `evaluate`."""
  compile: topology.Config = dataclasses.field(default_factory=topology.Config)
  """Of the command `compile`."""
  simulate: virtual.Config = dataclasses.field(default_factory=virtual.Config)
  """Of the command `simulate`."""

  def __post_init__(self):
    for name, least in (
      ("seed", 0),
      ("batches", 1),
      ("groups_per_batch", 1),
      ("group_size", 1),
      ("max_turns", 1),
      ("checkpoint_every", 1),
      ("checkpoints_kept", 1),
    ):
      if getattr(self, name) < least:
        raise ConfigError(
          f"config.{name} is {getattr(self, name)}; it must be >= {least}"
        )
    if self.seed >= 2**31:
      raise ConfigError(f"config.seed is {self.seed}; it must be < 2**31")
    schedules.parse(self.schedule)
    if self.remote.names_any and self.lag is not None:
      raise ConfigError(
        f"config.schedule is {self.schedule!r}; it must be 'async' where "
        "config.remote names generators, which take weights in their own time"
      )
    if self.remote.names_any and self.evaluation.frozen:
      raise ConfigError(
        "config.evaluation.frozen is True; it must be False where "
        "config.remote names generators; run the command evaluate on "
        "checkpoints instead"
      )
    staleness.staleness_bound(self.max_staleness)
    if staleness.staleness_bound(self.staleness_limit) < self._refresh_lag:
      raise ConfigError(
        f"config.max_staleness is {self.max_staleness}; it must be >= "
        f"config.engine.mismatch.refresh_period - 1 = {self._refresh_lag}: the "
        "generator's weights alone fall that far behind"
      )
    if self.sampling.filtered or self.sampling.temperature == 0:
      raise ConfigError(
        f"config.sampling is {self.sampling}; training needs temperature > 0, "
        "top_k 0, top_p 1 and min_p 0: the learner's logp is over the whole "
        "vocabulary, and a filtered one would not be the same distribution"
      )
    context, buckets = self.engine.context_length, self.engine.prefill_buckets
    if buckets[-1] > context:
      raise ConfigError(
        f"config.engine.prefill_buckets is {buckets}; the last must be <= "
        f"config.engine.context_length, {context}"
      )
    if self.learner.row_length < self.engine.context_length:
      raise ConfigError(
        f"config.learner.row_length is {self.learner.row_length}; it must be "
        f">= config.engine.context_length, {self.engine.context_length}"
      )
    self._check_head()
    self._check_replay()
    if self.pretrained is not None:
      with refusing("config.pretrained"):
        huggingface.check(self.pretrained, transformer.Policy(self.model))
    try:
      self.directory.format(**dataclasses.asdict(self))
    except (KeyError, IndexError) as error:
      raise ConfigError(
        f"config.directory is {self.directory!r}; {error} is not a field"
      ) from error

  def _check_head(self) -> None:
    """The generator must keep the head that the loss centres on."""
    module = algorithms.get(self.algorithm.name)
    required = algorithms.requires(module, self.algorithm.config)
    kept, wanted = self.engine.behavior_top_k, 0
    if "target_topk_logp" in required:
      wanted = self.algorithm.config.top_k or self.model.vocab_size
    if kept != wanted:
      raise ConfigError(
        f"config.engine.behavior_top_k is {kept}; "
        f"config.algorithm needs {wanted}"
      )

  def _check_replay(self) -> None:
    """The generator must record the experts that the learner replays."""
    replay, recorded = self.learner.router_replay, self.engine.record_experts
    if replay != recorded:
      raise ConfigError(
        f"config.engine.record_experts is {recorded}; it must be {replay}, as "
        "config.learner.router_replay is"
      )
    if replay and not self.model.num_experts:
      raise ConfigError(
        "config.learner.router_replay is True; it must be False, as "
        "config.model has no experts (num_experts 0)"
      )

  @property
  def run_directory(self) -> pathlib.Path:
    """The directory with its fields filled in."""
    return pathlib.Path(self.directory.format(**dataclasses.asdict(self)))

  @property
  def lag(self) -> int | None:
    """Of a serial schedule; None for async."""
    return schedules.parse(self.schedule)

  @property
  def staleness_limit(self) -> int | None:
    """The limit in force."""
    if self.lag is None:
      return self.max_staleness
    return self.lag + self._refresh_lag

  @property
  def admitted_staleness(self) -> int | None:
    """The part of the limit that admission may use up.

    A group that starts at a version samples from weights that the generator
    took over up to `refresh_period - 1` versions before.
    """
    limit = self.staleness_limit
    return None if limit is None else limit - self._refresh_lag

  @property
  def _refresh_lag(self) -> int:
    return self.engine.mismatch.refresh_period - 1

  def admitted_version(self, served: int) -> int:
    """The version that admission counts from while this one is served.

    It has used up what the generator's refresh period adds to the limit.
    """
    return served + self._refresh_lag

  @property
  def clean(self) -> "Config":
    """The same, with one generator, which computes as the learner does."""
    engine = dataclasses.replace(self.engine, mismatch=quantization.Config())
    return dataclasses.replace(self, engine=engine, remote=roster.Config())

  @property
  def num_devices(self) -> int:
    """Devices that each process of the run needs, with its own generator."""
    return self.devices_needed(self.distributed.processes)

  def devices_needed(self, processes: int) -> int:
    """The same for so many processes; the first has the generator."""
    trainer = -(-self.devices.trainer.size // processes)
    generator = self.devices.generator.size
    if self.lag is None:
      return trainer + generator
    return max(trainer, generator)


def meshes(config: Config) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
  """The trainer's and the generator's mesh.

  Each process gives as many devices to the trainer, its first ones; the
  generator's are those of process 0. Where all generators have processes of
  their own, it is the trainer's twice.

  Raises:
    ConfigError: there are too few devices.
  """
  count, size = jax.process_count(), config.devices.trainer.size
  if size % count:
    raise ConfigError(
      f"config.devices.trainer has {size} devices; it must be a multiple of "
      f"the {count} processes"
    )
  share, remote = size // count, config.remote.names_any
  local = [jax.local_devices(process_index=index) for index in range(count)]
  needed = share if remote else config.devices_needed(count)
  least = min(map(len, local))
  if least < needed:
    each = " in each process" * (count > 1)
    raise ConfigError(
      f"config.devices and schedule {config.schedule!r} need "
      f"{needed} devices{each}; there are {least}"
    )
  given = {device for devices in local for device in devices[:share]}
  trainer = sharding.make_mesh(
    config.devices.trainer, [d for d in jax.devices() if d in given]
  )
  if remote:
    return trainer, trainer
  free = local[0][share if config.lag is None else 0 :]
  return trainer, sharding.make_mesh(config.devices.generator, free)


@contextlib.contextmanager
def refusing(path: str) -> Iterator[None]:
  """Names the section of the config whose values a part refuses."""
  try:
    yield
  except ConfigError:
    raise
  except (ValueError, FileNotFoundError) as error:
    raise ConfigError(f"{path}: {error}") from error


def make_tokenizer(config: Config) -> tokenizer.Tokenizer:
  """The pretrained model's, or one id for each byte.

  Raises:
    ConfigError: the folder has none that can be read.
  """
  if config.pretrained is None:
    return tokenizer.ByteTokenizer()
  with refusing("config.pretrained"):
    return huggingface.load_tokenizer(config.pretrained)


def make_task(config: Config) -> tuple[envs.Task, dict[str, data.Rows]]:
  """The task and the rows of its splits, prepared on disk.

  Raises:
    ConfigError: the task's config does not fit, or its questions do not fit
      the sizes of model, generator and evaluation.
  """
  text = make_tokenizer(config)
  with refusing("config.task"):
    task = envs.get(config.task.name).Task(config.task.config, text)
    rows = data.prepare(task, pathlib.Path(config.cache) / "data")
  _check_questions(config, task, rows)
  return task, rows


def _check_questions(
  config: Config, task: envs.Task, rows: dict[str, data.Rows]
) -> None:
  """Refuses what would fail, question by question, once the run is going."""
  needed, ids = task.tokenizer.vocab_size, sampling(config, task).stop_ids
  if config.model.vocab_size < needed:
    raise ConfigError(
      f"config.model.vocab_size is {config.model.vocab_size}; the tokenizer "
      f"needs >= {needed}"
    )
  if len(ids) > config.engine.max_stop_ids:
    raise ConfigError(
      f"config.engine.max_stop_ids is {config.engine.max_stop_ids}; sampling "
      f"has {len(ids)} stop ids"
    )
  problems, held = config.evaluation.problems, len(rows["heldout"])
  if problems > held:
    raise ConfigError(
      f"config.evaluation.problems is {problems}; the held-out split of "
      f"config.task has {held} questions"
    )
  _check_prompts(config, task, rows)
  _check_demonstrations(config, task, rows)


def _check_prompts(
  config: Config, task: envs.Task, rows: dict[str, data.Rows]
) -> None:
  """Refuses prompts that do not fit the generator, or leave no room there.

  Where max_tokens is context_length or more, an answer may have all the room
  that its prompt leaves; turns share what there is.
  """
  asked = config.batches * config.groups_per_batch
  stream = prompt_stream(config, task, rows)
  problems = config.evaluation.problems
  prompts = data.heldout(rows["heldout"], problems, task.prompt)
  prompts += [stream[i] for i in range(min(asked, len(rows["train"])))]
  longest = max(len(prompt.tokens) for prompt in prompts)
  context, answer = config.engine.context_length, config.sampling.max_tokens
  if longest > config.engine.max_prompt_length:
    raise ConfigError(
      f"config.engine: context_length {context} and "
      f"prefill_buckets {config.engine.prefill_buckets} allow prompts of "
      f"{config.engine.max_prompt_length} tokens; config.task has one of "
      f"{longest}"
    )
  shared = config.max_turns > 1 or answer >= context
  if not shared and longest + answer > context:
    raise ConfigError(
      f"config.engine.context_length is {context}; config.task has a prompt of "
      f"{longest} tokens, and config.sampling.max_tokens {answer} more make "
      f"{longest + answer}"
    )


def _check_demonstrations(
  config: Config, task: envs.Task, rows: dict[str, data.Rows]
) -> None:
  """Refuses to imitate what no row holds or the sampler could not write."""
  if not config.warm_start.batches:
    return
  with refusing("config.warm_start"):
    shown = sft.longest(config.warm_start, task, rows["train"], config.seed)
  assert shown is not None, "a warm start has something to show, or raises"
  answer, most = len(shown.answer), config.sampling.max_tokens
  if answer > most:
    raise ConfigError(
      f"config.sampling.max_tokens is {most}; config.task "
      f"has a demonstration whose answer takes {answer} tokens, its end "
      f"included: {_text(task, shown.answer)}"
    )
  for name, room in (
    ("engine.context_length", config.engine.context_length),
    ("learner.row_length", config.learner.row_length),
  ):
    if shown.whole > room:
      raise ConfigError(
        f"config.{name} is {room}; config.task has a demonstration of "
        f"{shown.whole} tokens"
      )


def _text(task: envs.Task, answer: np.ndarray) -> str:
  """An answer as it is shown in a message, without its stop token."""
  return repr(task.tokenizer.decode(answer[:-1])[:80])


def doubts(
  config: Config, task: envs.Task, rows: dict[str, data.Rows]
) -> list[str]:
  """What may be meant, and probably is not; `make_task` refuses the rest.

  With a warm start, `make_task` has seen that the sampler can write what is
  shown. Without one, a policy may know shorter answers than the task's own.
  """
  if config.warm_start.batches:
    return []
  most = config.sampling.max_tokens
  shown = sft.longest(config.warm_start, task, rows["train"], config.seed)
  known = _stated(task, rows["train"]) if shown is None else shown.answer
  if len(known) <= most:
    return []
  return [
    f"config.sampling.max_tokens is {most}; config.task knows an answer of "
    f"{len(known)} tokens, its end included: {_text(task, known)}; whoever "
    "writes more than max_tokens is cut"
  ]


def _stated(task: envs.Task, rows: data.Rows) -> np.ndarray:
  """The longest of the first rows' fields `answer`; no tokens without any."""
  longest = ""
  for index in range(min(len(rows), sft.LOOKED_AT)):
    row = rows[index]
    stated = row.get("answer") or json.loads(row.get("row", "{}")).get("answer")
    longest = max(longest, stated if isinstance(stated, str) else "", key=len)
  return envs.encode_action(task.tokenizer, longest)


def make_engine(
  config: Config, mesh: jax.sharding.Mesh
) -> engines.PolicyEngine:
  """The generator's programs, nothing allocated.

  Raises:
    ConfigError: sizes do not divide over the mesh or do not fit each other.
  """
  with refusing("config.engine"):
    return engines.PolicyEngine(
      transformer.Policy(config.model), mesh, config.engine
    )


def make_driver(
  config: Config,
  mesh: jax.sharding.Mesh,
  on_failure: Callable[[BaseException], None] | None = None,
  decode_stop_ids: tuple[int, ...] = (),
) -> drivers.GenerationDriver:
  """The generator, without weights yet.

  Args:
    config: of the run.
    mesh: the generator's.
    on_failure: is told what ended it.
    decode_stop_ids: end the answers to JetStream's own clients, who cannot say
      what does, where the config's sampling has none.

  Raises:
    ConfigError: sizes do not divide over the mesh or do not fit each other.
  """
  engine = make_engine(config, mesh)
  with refusing("config.engine"):
    return drivers.GenerationDriver(
      engine,
      interruption=config.interruption,
      clock=time.monotonic,
      on_failure=on_failure,
      decode_sampling=dataclasses.replace(
        config.sampling, stop_ids=config.sampling.stop_ids or decode_stop_ids
      ),
    )


def make_fleet(
  config: Config,
  life: str,
  *,
  on_served: Callable[[int], None],
  on_failure: Callable[[BaseException], None],
) -> fleet.Fleet:
  """The generators of config.remote, not connected; see `Fleet`.

  Raises:
    ConfigError: a secret is not there, or not fit for its use.
  """
  with refusing("config.remote"):
    return fleet.Fleet(
      config.remote,
      life=life,
      on_served=on_served,
      on_failure=on_failure,
      clock=time.monotonic,
    )


def make_transport(config: Config, life: str) -> transports.Transport:
  """How weights reach config.remote; in every process of the trainer at once.

  Raises:
    ConfigError: other machines reach the trainer, and there is no token.
  """
  with refusing("config.transport"):
    token = servers.secret(
      "token_file", config.remote.token_file, servers.TOKEN_VARIABLE
    )
    directory = config.run_directory / "weights"
    return transports.make_transport(config.transport, directory, token, life)


def start_params(
  config: Config,
  task: envs.Task,
  rows: dict[str, data.Rows],
  mesh: jax.sharding.Mesh,
  view: View,
) -> Any:
  """Weights that RL starts from: imitation, or its cached result."""
  return sft.warm_start(
    config.warm_start,
    policy=transformer.Policy(config.model),
    pretrained=config.pretrained,
    task=task,
    rows=rows["train"],
    row_length=config.learner.row_length,
    mesh=mesh,
    seed=config.seed,
    cache=pathlib.Path(config.cache) / "warm_start",
    note=view.note,
  )


def make_learner(config: Config, mesh: jax.sharding.Mesh) -> learner.Learner:
  """The learner of the config's algorithm.

  Raises:
    ConfigError: weights or microbatch rows do not divide over the mesh.
  """
  with refusing("config.learner"):
    return learner.Learner(
      transformer.Policy(config.model),
      algorithms.get(config.algorithm.name),
      config.algorithm.config,
      config.learner,
      mesh,
      critic_config=config.critic,
    )


def make_buffer(config: Config) -> buffer.Buffer:
  """The buffer, with the staleness limit in force."""
  return buffer.Buffer(
    groups_per_batch=config.groups_per_batch,
    max_staleness=config.staleness_limit,
    on_stale=config.on_stale,
  )


def make_history(config: Config) -> history.History | None:
  """An empty history for algorithms that require its baselines."""
  loss = config.algorithm.config
  required = algorithms.requires(algorithms.get(config.algorithm.name), loss)
  if "baselines" not in required:
    return None
  return history.History(scope=loss.scope, window=loss.history_window)


def prompt_stream(
  config: Config, task: envs.Task, rows: dict[str, data.Rows]
) -> data.PromptStream:
  """The training prompts, by index."""
  return data.PromptStream(
    rows["train"], seed=config.seed, make_prompt=task.prompt
  )


def make_actor(
  config: Config,
  task: envs.Task,
  rows: dict[str, data.Rows],
  generator: Generator,
  groups: buffer.Buffer,
) -> actors.Actor:
  """The actor, not started.

  An algorithm that defines `keep(group)` (dapo's dynamic sampling) decides
  which groups are trained; the others give their place back.
  """
  return actors.Actor(
    actors.Config(
      sampling=sampling(config, task),
      group_size=config.group_size,
      total_groups=config.batches * config.groups_per_batch,
      max_turns=config.max_turns,
      max_trajectory_tokens=config.engine.context_length,
      seed=config.seed,
      limits=config.limits,
      shaping=config.shaping,
    ),
    generator=generator,
    make_group=functools.partial(envs.group, task),
    prompts=prompt_stream(config, task, rows).__getitem__,
    admission=staleness.Admission(
      groups_per_batch=config.groups_per_batch,
      max_staleness=config.admitted_staleness,
      max_running=config.max_running_groups,
    ),
    buffer=groups,
    keep=getattr(algorithms.get(config.algorithm.name), "keep", None),
  )


def sampling(config: Config, task: envs.Task) -> Sampling:
  """The config's, with the tokenizer's stop ids unless it names its own."""
  stop_ids = config.sampling.stop_ids or task.tokenizer.eos_ids
  return dataclasses.replace(config.sampling, stop_ids=stop_ids)


def claim(config: Config) -> dict[str, Any] | None:
  """Checks that the directory is free for this config; writes nothing.

  A run of another config that ended before it logged anything, as one whose
  reward function raises, leaves it free: the mended one may be started there.

  Returns:
    The summary if the run is complete.

  Raises:
    ConfigError: the directory belongs to a run of another config.
  """
  directory = config.run_directory
  path = directory / "config.json"
  if path.exists() and _left_something(directory):
    saved, asked = metrics.read_json(path), to_json(config)
    here = {name: asked[name] for name in _PLACES}
    lines = differences(saved | here, asked)
    if lines:
      raise ConfigError(
        f"{directory} holds a run of another config; choose another "
        "config.directory or remove it.\n" + "\n".join(lines)
      )
  summary = directory / "summary.json"
  return metrics.read_json(summary) if summary.exists() else None


def _left_something(directory: pathlib.Path) -> bool:
  """Whether a run's directory has a checkpoint or a row of figures."""
  saved = any((directory / "checkpoints").glob("[0-9]*"))
  return saved or bool(metrics.read_csv(directory / "metrics.csv"))


def record(config: Config) -> None:
  """Writes what the run is into its directory, which is ours now.

  Raises:
    ConfigError: until now it was another run's, of another config.
  """
  claim(config)
  directory = config.run_directory
  directory.mkdir(parents=True, exist_ok=True)
  metrics.write_json(directory / "config.json", to_json(config))
  metrics.write_json(directory / "environment.json", metrics.environment())
