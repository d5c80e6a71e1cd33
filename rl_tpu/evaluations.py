"""The held-out accuracy of a run: asked beside the training, logged in order.

A row belongs to the version that the evaluation started with, also where newer
weights reach the generator before it ends. It is written with the next batch,
by the thread that trains.
"""

from concurrent.futures import Future

from rl_tpu import data, envs, evaluate, metrics, parts, schedules
from rl_tpu.failures import EpisodesFailed, Failures
from rl_tpu.view import View


class Evaluations:
  """Those of one run."""

  def __init__(
    self,
    config: parts.Config,
    task: envs.Task,
    rows: dict[str, data.Rows],
    view: View,
  ):
    """Chooses the questions, which stay the same."""
    self._config, self._task, self._view = config, task, view
    self._heldout = data.heldout(
      rows["heldout"], config.evaluation.problems, task.prompt
    )
    self._started: list[tuple[int, Future[dict[str, float]]]] = []
    self.latest: dict[str, float] = {}
    """The last accuracy that was logged."""

  async def ask(self, generator: schedules.Generator) -> dict[str, float]:
    """The accuracy now.

    Raises:
      EpisodesFailed: nothing was evaluated yet, and every episode failed.
      Exception: the generator failed; that says nothing of the policy.
    """
    failures = Failures()
    row = await evaluate.evaluate(
      generator,
      self._task.environment,
      self._heldout,
      sampling=parts.sampling(self._config, self._task),
      seed=self._config.seed,
      max_turns=self._config.max_turns,
      max_trajectory_tokens=self._config.engine.context_length,
      limits=self._config.limits,
      failures=failures,
    )
    failures.close()
    if generator.failure is not None:
      raise generator.failure
    asked = 2 * len(self._heldout)
    if row["heldout_failed"] == asked and not self.latest:
      raise EpisodesFailed(
        f"all {asked} episodes of the first evaluation failed; the first of "
        f"them: {failures.first}"
      )
    return row

  def start(
    self,
    version: int,
    schedule: schedules.Schedule,
    generator: schedules.Generator,
  ) -> None:
    """Evaluates beside the training, from this version's weights on."""
    self._started.append((version, schedule.submit(self.ask(generator))))

  def log_ended(self, log: metrics.RunLog) -> None:
    """Logs those that have ended."""
    for ended in [one for one in self._started if one[1].done()]:
      self._started.remove(ended)
      self.log(log, ended[0], ended[1].result())

  def finish(self, log: metrics.RunLog) -> None:
    """Waits for those under way and logs them."""
    for version, future in self._started:
      self.log(log, version, future.result())
    self._started = []

  def log(
    self, log: metrics.RunLog, version: int, row: dict[str, float]
  ) -> None:
    """Writes and shows held-out accuracy."""
    log.write(version, row)
    self.latest = {"heldout_accuracy": row["heldout_accuracy"]}
    self._view.note(
      f"held-out accuracy after batch {version}: "
      f"{row['heldout_accuracy']:.3f} sampled, "
      f"{row['heldout_greedy']:.3f} greedy"
      + (f", {row['heldout_failed']:.0f} failed" * bool(row["heldout_failed"]))
    )
