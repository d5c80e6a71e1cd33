"""The contracts that every part of the system shares.

Alignment, once: every per-token array is aligned to `tokens`; entry t speaks of
`tokens[t]` given `tokens[:t]`. The first token of a trajectory is never an
action. Host types (Prompt, Trajectory, Group) are ragged NumPy; device types
(Batch, PolicyOutputs, Estimate) are pytrees of packed arrays.

Axes: N trajectories, R rows, T tokens, K sampler's head, B bins of a value,
L layers and k experts that each takes a token through.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

StopReason = Literal["stop", "length", "env", "error"]
STOP_REASONS = ("stop", "length", "env", "error")


class EpisodeError(RuntimeError):
  """An episode that cannot become a trajectory, for a reason with a name.

  `kind` names what went wrong in a word or two, lower case with underscores;
  the log counts failed groups by it. `same` is equal for failures that are one
  fault ("": none can tell), `detail` lines for whoever mends it.
  """

  def __init__(
    self, kind: str, message: str, *, same: str = "", detail: str = ""
  ):
    super().__init__(f"{kind}: {message}")
    self.kind, self.message = kind, message
    self.same, self.detail = same, detail


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """One task to attempt.

  `index` is its place in the stream of prompts and its identity: it is never
  used twice in a run, also when an epoch brings the same text again.
  """

  index: int
  tokens: np.ndarray
  """i32[P], what the policy is conditioned on first."""
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """What the environment needs to judge an answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How tokens are drawn; each request carries its own."""

  temperature: float = 1.0
  """Divides the logits, > 0; 0 takes the most likely token (logp 0)."""
  max_tokens: int = 16
  """Most action tokens of one call, >= 1."""
  stop_ids: tuple[int, ...] = ()
  """Any of these ends the call; the sampled stop token is kept."""
  min_tokens: int = 0
  """Stop ids are not sampled before this many tokens, in [0, max_tokens]."""
  top_k: int = 0
  """Keep the k most likely tokens; 0 or -1 is off."""
  top_p: float = 1.0
  """Keep the smallest set of tokens with this mass, in (0, 1]; 1 is off."""
  min_p: float = 0.0
  """Keep tokens at least this share as likely as the top one; 0 is off."""

  def __post_init__(self):
    for name, good, allowed in (
      ("temperature", self.temperature >= 0, ">= 0"),
      ("max_tokens", self.max_tokens >= 1, ">= 1"),
      ("top_k", self.top_k >= -1, ">= -1"),
      ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
      ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
      (
        "min_tokens",
        0 <= self.min_tokens <= self.max_tokens,
        f"in [0, max_tokens = {self.max_tokens}]",
      ),
    ):
      if not good:
        raise ValueError(
          f"Sampling.{name} is {getattr(self, name)!r}; it must be {allowed}"
        )

  @property
  def filtered(self) -> bool:
    """Whether the distribution sampled from has a smaller support."""
    least = self.min_tokens > 0
    return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One call to a generator: continue `tokens`.

  The key of the token at position t is fold_in(seed, prompt_index, member, t):
  a sample depends on weights and identity, never on slot, batch or order.
  """

  prompt_index: int
  member: int
  tokens: np.ndarray
  """i32[P], P >= 1: prompt and everything so far, already tokenised."""
  sampling: Sampling
  seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """What one dispatch of a generator sampled for one request (n tokens)."""

  tokens: np.ndarray
  """i32[n], n >= 1."""
  logp: np.ndarray
  """f32[n], under the distribution really sampled from."""
  version: int
  """Of the weights that sampled them."""
  stop_reason: StopReason | None = None
  """Set in the request's last chunk, and there only."""
  topk_ids: np.ndarray | None = None
  """i32[n, K]; None where K = 0."""
  topk_logp: np.ndarray | None = None
  """f32[n, K]."""
  experts: np.ndarray | None = None
  """i16[n, L, k]; None where they are not recorded."""


@dataclasses.dataclass(kw_only=True)
class Turn:
  """One turn of an episode, under way or done.

  All turns of an episode so far are its progress: with them, it can go on in
  another life of the run.
  """

  observation: np.ndarray
  """i32[n], what the environment said before it."""
  chunks: list[Chunk] = dataclasses.field(default_factory=list)
  """What was sampled so far; the last one's stop reason says whether the turn
  is done."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """What a generator sampled for one request (n tokens, n >= 1)."""

  tokens: np.ndarray
  """i32[n], the sampled stop token included."""
  logp: np.ndarray
  """f32[n], under the distribution really sampled from."""
  version: np.ndarray
  """i32[n], version of the weights that sampled each token."""
  stop_reason: StopReason
  """`stop` (a stop id was sampled) or `length` (budget or context full)."""
  topk_ids: np.ndarray | None = None
  """i32[n, K], the most likely tokens of each step; None where K = 0."""
  topk_logp: np.ndarray | None = None
  """f32[n, K], of the same distribution as `logp`."""
  experts: np.ndarray | None = None
  """i16[n, L, k], those that each layer took for `logp`; None where they are
  not recorded."""


EXTRAS = ("topk_ids", "topk_logp", "experts")
"""Arrays over the tokens of a chunk or completion that may be None."""


def extras(sampled: Chunk | Completion) -> dict[str, np.ndarray]:
  """Those of `EXTRAS` that are there, by name."""
  arrays = {name: getattr(sampled, name) for name in EXTRAS}
  return {name: array for name, array in arrays.items() if array is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
  """One episode as one token stream; every array has T entries."""

  prompt_id: int
  """The prompt's index."""
  group_id: int
  """Who shares a baseline; equal for the members of one group."""
  member: int
  """Place in the group, 0..G-1."""
  tokens: np.ndarray
  """i32[T]: prompt, actions and observations as the model saw them."""
  action_mask: np.ndarray
  """bool[T]: sampled by the policy (the sampled stop token included)."""
  behavior_logp: np.ndarray
  """f32[T]: under the distribution really sampled from; 0 off actions."""
  token_version: np.ndarray
  """i32[T]: version of the weights that sampled it; -1 off actions."""
  rewards: np.ndarray
  """f32[T]: an outcome lies on the last action token."""
  temperature: float = 1.0
  stop_reason: StopReason = "stop"
  behavior_topk_ids: np.ndarray | None = None
  """i32[T, K], the sampler's head for score centering: its most likely tokens;
  -1 where unused. None where the sampler keeps no head (K = 0)."""
  behavior_topk_logp: np.ndarray | None = None
  """f32[T, K], their logp under the distribution sampled from; -inf where
  unused."""
  behavior_experts: np.ndarray | None = None
  """i16[T, L, k], for router replay: the experts that each layer took in the
  pass that gave the token's distribution, which is that of the token before;
  -1 where nothing was sampled. None where the sampler does not record them."""
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """What its environment counted, summed over the turns."""

  def __post_init__(self):
    shape = np.shape(self.tokens)
    for name in ("action_mask", "behavior_logp", "token_version", "rewards"):
      if np.shape(getattr(self, name)) != shape or len(shape) != 1:
        raise ValueError(
          f"Trajectory.{name} has shape {np.shape(getattr(self, name))}; "
          f"it must be [T] like tokens, which has {shape}"
        )
    head = (self.behavior_topk_ids, self.behavior_topk_logp)
    ids, logp = (() if array is None else np.shape(array) for array in head)
    if ids != logp or (ids and (len(ids) != 2 or ids[:1] != shape)):
      raise ValueError(
        f"Trajectory.behavior_topk_ids and _logp have shapes {ids} and {logp}; "
        f"they must be [T, K] alike, with T = {shape[0]}, or both None"
      )
    experts = self.behavior_experts
    if experts is not None and (experts.ndim, len(experts)) != (3, *shape):
      raise ValueError(
        f"Trajectory.behavior_experts has shape {experts.shape}; it must be "
        f"[T, L, k], with T = {shape[0]}, or None"
      )
    if not shape[0] or self.action_mask[0] or not self.action_mask.any():
      raise ValueError(
        "Trajectory.action_mask must start with False and hold an action; "
        f"it is {np.asarray(self.action_mask).tolist()}"
      )
    if self.stop_reason not in STOP_REASONS:
      raise ValueError(
        f"Trajectory.stop_reason is {self.stop_reason!r}; "
        f"it must be one of {STOP_REASONS}"
      )

  def __len__(self) -> int:
    """Number of tokens T."""
    return len(self.tokens)

  @property
  def oldest_version(self) -> int:
    """Version of its oldest action token."""
    return int(self.token_version[self.action_mask].min())

  @property
  def outcome(self) -> float:
    """Sum of its rewards."""
    return float(self.rewards.sum())

  def staleness(self, version: int) -> int:
    """The largest `version - token_version` over its action tokens."""
    return version - self.oldest_version


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """The trajectories of one prompt; they share a baseline."""

  prompt: Prompt
  trajectories: tuple[Trajectory, ...]

  def staleness(self, version: int) -> int:
    """The largest staleness of its trajectories."""
    return max(t.staleness(version) for t in self.trajectories)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """Packed trajectories on device: R rows of T tokens, several a row.

  Fields of shape [N] belong to trajectories, numbered by `trajectory_ids`;
  unused places carry group -1. The learner writes the last three fields; head
  arrays are absent where the sampler keeps no head, experts where it does not
  record them, baselines where the algorithm does not require them.
  """

  tokens: Int[Array, "R T"]
  trajectory_ids: Int[Array, "R T"]
  """0..N-1, unique in the batch; -1 on padding."""
  positions: Int[Array, "R T"]
  """Place in the trajectory, 0 on padding."""
  action_mask: Bool[Array, "R T"]
  behavior_logp: Float[Array, "R T"]
  token_version: Int[Array, "R T"]
  rewards: Float[Array, "R T"]
  temperature: Float[Array, "R T"]
  """1 on padding."""
  truncated: Bool[Array, " N"]
  """The budget ended the trajectory, not the policy or environment."""
  group_ids: Int[Array, " N"]
  """Who shares a baseline; -1 where there is no trajectory."""
  version: Int[Array, ""]
  """Version v of the weights before this batch is trained."""
  behavior_topk_ids: Int[Array, "R T K"] | None = None
  """The sampler's head; -1 where unused. None where K = 0."""
  behavior_topk_logp: Float[Array, "R T K"] | None = None
  """-inf where unused."""
  behavior_experts: Int[Array, "R T L k"] | None = None
  """For router replay; -1 where nothing was sampled. None without it."""
  baselines: Float[Array, " N"] | None = None
  """Running mean of earlier outcomes; NaN where there were none."""
  advantages: Float[Array, "R T"] | None = None
  returns: Float[Array, "R T"] | None = None
  values: Float[Array, "R T"] | None = None

  ROW_FIELDS = (
    "tokens",
    "trajectory_ids",
    "positions",
    "action_mask",
    "behavior_logp",
    "token_version",
    "rewards",
    "temperature",
    "behavior_topk_ids",
    "behavior_topk_logp",
    "behavior_experts",
    "advantages",
    "returns",
    "values",
  )

  def map_rows(self, function) -> "Batch":
    """Applies `function` to every array that has a row axis."""
    present = {
      name: function(getattr(self, name))
      for name in self.ROW_FIELDS
      if getattr(self, name) is not None
    }
    return dataclasses.replace(self, **present)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyOutputs:
  """What the learner computed for a batch, aligned to its tokens.

  Everything but `target_logp` is None unless the algorithm requires it. Off the
  action mask the values mean nothing.
  """

  target_logp: Float[Array, "R T"]
  """Of the policy being differentiated."""
  proximal_logp: Float[Array, "R T"] | None = None
  """Of the weights before this batch's update."""
  reference_logp: Float[Array, "R T"] | None = None
  """Of the frozen policy of a KL term."""
  entropy: Float[Array, "R T"] | None = None
  """Of the target distribution, in nats."""
  values: Float[Array, "R T"] | None = None
  """Of the critic: the return to expect from the state before each token."""
  value_logits: Float[Array, "R T B"] | None = None
  """Of the histogram whose mean `values` is, where the critic has one."""
  target_topk_logp: Float[Array, "R T K"] | None = None
  """Of the behavior policy's head, under the target policy; normalised over
  the whole vocabulary. Meaningless where the head's id is -1."""
  proximal_topk_logp: Float[Array, "R T K"] | None = None
  """The same under the proximal policy."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
  """A mean that can still be added to: a sum with its own denominator.

  Micro-batches and devices add totals and counts; the division happens once.
  A loss and most metrics are one number, the loads of experts an array of them.
  """

  total: Float[Array, "..."]
  count: Float[Array, ""]

  def __add__(self, other: "Estimate") -> "Estimate":
    """Pools two estimates of the same quantity."""
    return Estimate(
      total=self.total + other.total, count=self.count + other.count
    )

  def mean(self, empty: float) -> Float[Array, "..."]:
    """The quotient, or `empty` where nothing was counted."""
    some = self.count > 0
    return jnp.where(some, self.total / jnp.where(some, self.count, 1.0), empty)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionedParams:
  """Weights and the version they are, which travel as one object."""

  version: int
  params: Any
