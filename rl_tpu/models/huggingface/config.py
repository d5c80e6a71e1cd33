"""A folder's `config.json` as the decoder's config, and back.

What the decoder would compute differently is refused by its key: silence would
give a model that looks right and is not. Keys are read as transformers spells
them before and since version 5 and written in the older spelling, which both
read.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal

from rl_tpu.models import transformer
from rl_tpu.models.rotary import Scaling

Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class _Family:
  """What one architecture fixes."""

  model_type: str
  qk_norm: bool
  biases: Literal["qkv"] | None = None
  """Of attention; None: all four or none, as `attention_bias` says."""
  own_head_dim: bool = False
  """Whether the size of a head is stated apart from width and heads."""
  experts: bool = False
  """Whether every feed-forward block is a mixture of experts."""


_FAMILIES = {
  "LlamaForCausalLM": _Family("llama", qk_norm=False),
  "Qwen2ForCausalLM": _Family("qwen2", qk_norm=False, biases="qkv"),
  "Qwen3ForCausalLM": _Family("qwen3", qk_norm=True, own_head_dim=True),
  "Qwen3MoeForCausalLM": _Family(
    "qwen3_moe", qk_norm=True, own_head_dim=True, experts=True
  ),
}
"""Llama 3 and whatever shares its architecture; Qwen2 and 2.5; Qwen3."""


def read(folder: str | PathLike[str]) -> transformer.Config:
  """The decoder that a folder describes, computing in float32.

  Raises:
    FileNotFoundError: there is no config.json.
    ValueError: the architecture or a setting is not supported, or missing;
      names the key.
  """
  raw = _Settings(folder)
  family = raw.family()
  raw.refuse_unsupported()
  theta, scaling = raw.rope()
  d_model, heads = raw.need("hidden_size"), raw.need("num_attention_heads")
  return transformer.Config(
    vocab_size=raw.need("vocab_size"),
    d_model=d_model,
    num_layers=raw.need("num_hidden_layers"),
    num_heads=heads,
    num_kv_heads=raw.need("num_key_value_heads"),
    head_dim=raw.need("head_dim")
    if family.own_head_dim
    else raw.get("head_dim", d_model // heads),
    **(
      raw.experts()
      if family.experts
      else {"d_ff": raw.need("intermediate_size")}
    ),
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=float(raw.need("rms_norm_eps")),
    qk_norm=family.qk_norm,
    attention_bias=family.biases
    or ("qkvo" if raw.get("attention_bias", False) else None),
    tied=raw.get("tie_word_embeddings", False),
  )


def stored(folder: str | PathLike[str]) -> tuple[int, Dtype]:
  """Longest sequence of a folder's model, and a dtype that loses nothing."""
  raw = _Settings(folder)
  narrow = raw.get("dtype", raw.get("torch_dtype")) == "bfloat16"
  longest = raw.need("max_position_embeddings")
  return longest, "bfloat16" if narrow else "float32"


class _Settings:
  """The values of a config.json; null is the same as a missing key."""

  def __init__(self, folder: str | PathLike[str]):
    self._path = pathlib.Path(folder) / "config.json"
    if not self._path.is_file():
      raise FileNotFoundError(f"{self._path} is not there: no model to read")
    self._values: dict[str, Any] = json.loads(self._path.read_text("utf-8"))

  def get(self, key: str, default: Any = None) -> Any:
    value = self._values.get(key)
    return default if value is None else value

  def need(self, key: str) -> Any:
    value = self.get(key)
    if value is None:
      raise ValueError(f"{self._path} lacks {key!r}")
    return value

  def family(self) -> _Family:
    names = self.get("architectures", [])
    for name in names:
      if name in _FAMILIES:
        return _FAMILIES[name]
    raise ValueError(
      f"{self._path}: architectures is {names}, of model_type "
      f"{self.get('model_type')!r}; it must be one of {sorted(_FAMILIES)}"
    )

  def refuse_unsupported(self) -> None:
    """Names what asks for another computation than the decoder's."""
    get = self.get
    for key, good, allowed in (
      ("hidden_act", get("hidden_act", "silu") == "silu", "'silu'"),
      ("mlp_bias", not get("mlp_bias"), "false"),
      ("use_sliding_window", not get("use_sliding_window"), "false"),
      (
        "layer_types",
        set(get("layer_types", [])) <= {"full_attention"},
        "'full_attention' in every layer",
      ),
      (
        "quantization_config",
        get("quantization_config") is None,
        "absent: weights are float32, bfloat16 or float16",
      ),
    ):
      if not good:
        raise ValueError(
          f"{self._path}: {key} is {get(key)!r}; it must be {allowed}"
        )

  def experts(self) -> dict[str, Any]:
    """The decoder's fields of a mixture of experts in every layer."""
    for key, good, allowed in (
      ("decoder_sparse_step", self.get("decoder_sparse_step", 1) == 1, "1"),
      ("mlp_only_layers", not self.get("mlp_only_layers"), "empty"),
    ):
      if not good:
        raise ValueError(
          f"{self._path}: {key} is {self.get(key)!r}; it must be {allowed}: "
          "every layer has experts"
        )
    return {
      "d_ff": self.need("moe_intermediate_size"),
      "num_experts": self.get("num_local_experts") or self.need("num_experts"),
      "experts_per_token": self.need("num_experts_per_tok"),
      "normalize_gates": self.get("norm_topk_prob", False),
    }

  def rope(self) -> tuple[float, Scaling | None]:
    """Base and scaling of the rotary frequencies."""
    rope = self.get("rope_parameters") or self.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or self.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor") or self.get(
      "partial_rotary_factor", 1.0
    )
    if share != 1.0:
      raise ValueError(
        f"{self._path}: partial_rotary_factor is {share}; it must be 1"
      )
    if kind == "default":
      return theta, None
    try:
      if kind == "llama3":
        return theta, self._llama3(rope)
      if kind == "yarn":
        return theta, self._yarn(rope)
    except KeyError as error:
      raise ValueError(
        f"{self._path}: rope scaling of type {kind} lacks {error}"
      ) from error
    raise ValueError(
      f"{self._path}: the type of rope scaling is {kind!r}; it must be "
      "'default', 'llama3' or 'yarn'"
    )

  def _original_length(self, rope: Mapping[str, Any]) -> int:
    name = "original_max_position_embeddings"
    return (
      self.get(name) or rope.get(name) or self.need("max_position_embeddings")
    )

  def _llama3(self, rope: Mapping[str, Any]) -> Scaling:
    return Scaling(
      kind="llama3",
      factor=float(rope["factor"]),
      original_length=self._original_length(rope),
      low=float(rope["low_freq_factor"]),
      high=float(rope["high_freq_factor"]),
    )

  def _yarn(self, rope: Mapping[str, Any]) -> Scaling:
    original = self._original_length(rope)
    factor = rope["factor"]
    if factor is None:
      factor = self.need("max_position_embeddings") / original
    return Scaling(
      kind="yarn",
      factor=float(factor),
      original_length=original,
      low=float(rope.get("beta_slow") or 1),
      high=float(rope.get("beta_fast") or 32),
      attention_factor=_yarn_attention(float(factor), rope),
      whole_pairs=rope.get("truncate", True),
    )


def _yarn_attention(factor: float, rope: Mapping[str, Any]) -> float:
  """What multiplies sine and cosine: as stated, or as the paper suggests."""

  def suggested(scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

  if rope.get("attention_factor") is not None:
    return float(rope["attention_factor"])
  if rope.get("mscale") and rope.get("mscale_all_dim"):
    return suggested(rope["mscale"]) / suggested(rope["mscale_all_dim"])
  return suggested(1.0)


def to_json(
  config: transformer.Config, dtype: Dtype, longest: int
) -> dict[str, Any]:
  """What `config.json` says of a decoder, apart from special tokens.

  Args:
    config: of the decoder.
    dtype: of the weights in the files.
    longest: positions that the model is good for.

  Raises:
    ValueError: no architecture has this combination of norms, biases and
      experts.
  """
  architecture, family = _family_of(config)
  return {
    "architectures": [architecture],
    "model_type": family.model_type,
    "vocab_size": config.vocab_size,
    "hidden_size": config.d_model,
    "intermediate_size": config.d_ff,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "attention_bias": config.attention_bias is not None,
    "attention_dropout": 0.0,
    "max_position_embeddings": longest,
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
    "rope_scaling": _scaling_json(config.rope_scaling),
    "tie_word_embeddings": config.tied,
    "torch_dtype": dtype,
    "use_cache": True,
  } | (_experts_json(config) if family.experts else {})


def _experts_json(config: transformer.Config) -> dict[str, Any]:
  return {
    "num_experts": config.num_experts,
    "num_experts_per_tok": config.experts_per_token,
    "moe_intermediate_size": config.d_ff,
    "norm_topk_prob": config.normalize_gates,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
  }


def _family_of(config: transformer.Config) -> tuple[str, _Family]:
  """The architecture that has these norms, biases and experts."""
  for architecture, family in _FAMILIES.items():
    biases = (family.biases,) if family.biases else (None, "qkvo")
    if (
      family.qk_norm == config.qk_norm
      and config.attention_bias in biases
      and family.experts == bool(config.num_experts)
    ):
      return architecture, family
  raise ValueError(
    f"qk_norm {config.qk_norm} with attention_bias {config.attention_bias!r} "
    f"and num_experts {config.num_experts} is none of {sorted(_FAMILIES)}: it "
    "cannot be exported"
  )


def _scaling_json(scaling: Scaling | None) -> dict[str, Any] | None:
  if scaling is None:
    return None
  shared = {
    "rope_type": scaling.kind,
    "factor": scaling.factor,
    "original_max_position_embeddings": scaling.original_length,
  }
  if scaling.kind == "llama3":
    return shared | {
      "low_freq_factor": scaling.low,
      "high_freq_factor": scaling.high,
    }
  return shared | {
    "beta_slow": scaling.low,
    "beta_fast": scaling.high,
    "attention_factor": scaling.attention_factor,
    "truncate": scaling.whole_pairs,
  }
