"""The command `evaluate`: how good are some weights at a task?

Any checkpoint of ours or folder in Hugging Face's format, any task: see
`attempts`. The policy is asked as it is, without the mismatch of a run's
generator, by an engine of its own on this process's first devices, so it may
run beside the training whose checkpoints it reads. The results, every attempt
with its text, are there when all of them are.
"""

import asyncio
import concurrent.futures
import dataclasses
import json
import os
import pathlib
from typing import Any

import jax

from rl_tpu import attempts, data, envs, parts, sharding
from rl_tpu.config import ConfigError
from rl_tpu.generation import policies
from rl_tpu.generation.driver import GenerationDriver
from rl_tpu.models import huggingface
from rl_tpu.types import VersionedParams
from rl_tpu.view import View


def run(config: parts.Config, view: View) -> dict[str, Any]:
  """Attempts the questions and writes what came of it.

  Returns:
    `batch` (of the checkpoint; null for a folder), `checkpoint`, `results`,
    and the figures of `attempts.figures`.

  Raises:
    ConfigError: there is no such checkpoint, or it does not fit the config, or
      the task the engine.
    Exception: what ended the generator.
  """
  path = _checkpoint(config)
  batch = int(path.name) if (path / "state").is_dir() else None
  config = _of_checkpoint(config, path, batch).clean
  task, rows = parts.make_task(config)
  prompts = _prompts(config, task, rows)
  failed: concurrent.futures.Future[None] = concurrent.futures.Future()
  mesh = sharding.make_mesh(config.devices.generator, jax.devices())
  driver = parts.make_driver(config, mesh, failed.set_exception)
  driver.update(_load(driver, path, batch))
  view.note(f"{len(prompts)} questions for the weights of {path}")
  results = _results(config, path, task)
  results.parent.mkdir(parents=True, exist_ok=True)
  driver.warm_up()
  driver.start()
  try:
    made = _attempt(config, task, prompts, driver, results)
  finally:
    driver.stop()
  if failed.done():
    failed.result()
  os.replace(_partial(results), results)
  found = attempts.figures(made, config.evaluate)
  named = {"batch": batch, "checkpoint": str(path), "results": str(results)}
  return named | found


def _checkpoint(config: parts.Config) -> pathlib.Path:
  """The version's directory, or the folder."""
  asked = pathlib.Path(config.evaluate.checkpoint or config.run_directory)
  if (asked / "config.json").is_file() and any(asked.glob("*.safetensors")):
    return asked
  if (asked / "state").is_dir() and asked.name.isdigit():
    return asked
  if not (asked / "checkpoints").is_dir():
    raise ConfigError(
      f"{asked / 'checkpoints'} is not there, nor is {asked} a folder with "
      "config.json and *.safetensors: nothing to evaluate"
    )
  newest = policies.newest(asked / "checkpoints")
  if newest is None:
    raise ConfigError(f"{asked} holds no checkpoint to evaluate")
  return newest


def _of_checkpoint(
  config: parts.Config, path: pathlib.Path, batch: int | None
) -> parts.Config:
  """The config with what a folder brings, and the questions asked."""
  evaluation = dataclasses.replace(config.evaluation, problems=1)
  config = dataclasses.replace(config, evaluation=evaluation)
  if batch is not None:
    return config
  try:
    model = huggingface.read_config(path)
  except (ValueError, FileNotFoundError) as error:
    raise ConfigError(f"config.evaluate.checkpoint: {error}") from error
  here = config.model
  model = dataclasses.replace(
    model,
    compute_dtype=here.compute_dtype,
    remat=here.remat,
    unroll=here.unroll,
  )
  return dataclasses.replace(config, model=model, pretrained=str(path))


def _prompts(
  config: parts.Config, task: envs.Task, rows: dict[str, data.Rows]
) -> list:
  """The questions asked: the first ones of the split."""
  asked, own = config.evaluate, rows[config.evaluate.split]
  problems = len(own) if asked.problems is None else asked.problems
  if problems > len(own):
    raise ConfigError(
      f"config.evaluate.problems is {problems}; the {asked.split} split of "
      f"config.task has {len(own)} questions"
    )
  return data.heldout(own, problems, task.prompt)


def _load(
  driver: GenerationDriver, path: pathlib.Path, batch: int | None
) -> VersionedParams:
  engine = driver.engine
  try:
    if batch is not None:
      return policies.load(engine, path, batch)
    params = huggingface.load(path, engine.policy, engine.mesh)
  except (ValueError, FileNotFoundError) as error:
    raise ConfigError(f"config.evaluate.checkpoint: {error}") from error
  return engine.load_params(params)


def _results(
  config: parts.Config, path: pathlib.Path, task: envs.Task
) -> pathlib.Path:
  if config.evaluate.results is not None:
    return pathlib.Path(config.evaluate.results)
  directory = config.run_directory / "evaluations"
  return directory / f"{task.name}-{path.name}.jsonl"


def _partial(results: pathlib.Path) -> pathlib.Path:
  return results.with_name(results.name + ".partial")


def _attempt(
  config: parts.Config,
  task: envs.Task,
  prompts: list,
  driver: GenerationDriver,
  results: pathlib.Path,
) -> list[attempts.Attempt]:
  """Attempts all questions; each attempt is written as it ends."""
  asked, sampling = config.evaluate, parts.sampling(config, task)
  if asked.temperature is not None:
    sampling = dataclasses.replace(sampling, temperature=asked.temperature)
  with open(_partial(results), "w") as file:

    def write(one: attempts.Attempt) -> None:
      file.write(json.dumps(attempts.record(one, task.tokenizer)) + "\n")

    return asyncio.run(
      attempts.attempt(
        driver,
        task.environment,
        prompts,
        sampling=sampling,
        seed=config.seed,
        max_turns=config.max_turns,
        max_trajectory_tokens=config.engine.context_length,
        limits=config.limits,
        attempts=asked.attempts,
        running=4 * config.engine.slots,
        ended=write,
      )
    )
