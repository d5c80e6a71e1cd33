import dataclasses
import json
import math
import pathlib
import shutil
import tracemalloc

import jax
import numpy as np
import pytest
import safetensors.numpy

from rl_tpu import sharding, weights
from rl_tpu.models import huggingface, transformer
from rl_tpu.models.rotary import Scaling
from rl_tpu.models.tokenizer import ByteTokenizer

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "huggingface"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
SHARDED, SINGLE = "qwen2_tied_sharded", "qwen3_tied_bf16"
EXPERTS = "qwen3moe_untied_sharded"


def mesh(**shape):
  return sharding.make_mesh(sharding.MeshShape(**shape), jax.devices())


def imported(folder, **shape):
  policy = transformer.Policy(huggingface.read_config(folder))
  return policy, huggingface.load(folder, policy, mesh(**shape))


def logits(policy, params, tokens):
  places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)

  @jax.jit
  def whole(params):
    hidden = policy.hidden(params, tokens, places, np.zeros_like(tokens))
    return policy.logits(params, hidden)

  return np.asarray(whole(params))


def export(folder, params, config, dtype="float32", **arguments):
  huggingface.save(
    folder,
    params,
    config,
    ByteTokenizer(),
    dtype=dtype,
    longest=256,
    **arguments,
  )


def assert_equal(params, expected):
  jax.tree.map(np.testing.assert_array_equal, params, expected)


def tensors(folder):
  """Every tensor of a folder's files, by name."""
  found = {}
  for file in folder.glob("*.safetensors"):
    found |= safetensors.numpy.load_file(file)
  return found


def copied(name, below):
  """A golden folder as one file, to be changed."""
  folder = below / name
  shutil.copytree(GOLDEN / name, folder)
  rewrite(folder, tensors(folder))
  return folder


def rewrite(folder, changed):
  for file in folder.glob("model*"):
    file.unlink()
  safetensors.numpy.save_file(changed, folder / "model.safetensors")


def change_config(folder, **changes):
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name):
  expected = np.load(GOLDEN / name / "expected.npz")
  got = logits(*imported(GOLDEN / name), expected["tokens"])
  np.testing.assert_allclose(got, expected["logits"], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_X14_X08_logits_are_the_same_on_a_2x2_mesh_after_import_and_sync(name):
  tokens = np.load(GOLDEN / name / "expected.npz")["tokens"]
  policy, params = imported(GOLDEN / name)
  assert (policy.config.num_heads, policy.config.num_kv_heads) == (4, 2)
  expected = logits(policy, params, tokens)
  _, spread = imported(GOLDEN / name, fsdp=2, tensor=2)
  assert_equal(spread, params)
  query = spread["layers"]["attention"]["query"].addressable_shards[0].data
  assert query.shape == (2, 12, 2, policy.config.head_dim)
  with jax.set_mesh(mesh(fsdp=2, tensor=2)):
    got = logits(policy, spread, tokens)
  np.testing.assert_allclose(got, expected, atol=1e-5)
  generator = mesh(tensor=2)
  synced = weights.publish(spread, 1, policy.param_shardings(generator)).params
  with jax.set_mesh(generator):
    got = logits(policy, synced, tokens)
  np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_file_bytes", [10_000, 10**9])
def test_a_round_trip_changes_no_bit(name, max_file_bytes, tmp_path):
  _, dtype = huggingface.stored(GOLDEN / name)
  policy, params = imported(GOLDEN / name)
  export(
    tmp_path,
    params,
    policy.config,
    dtype=dtype,
    max_file_bytes=max_file_bytes,
  )
  index = tmp_path / "model.safetensors.index.json"
  assert index.exists() == (max_file_bytes < 10**9)
  modes = {file.stat().st_mode for file in tmp_path.iterdir()}
  assert len(modes) == 1, "whoever may read one file may read all"
  assert huggingface.read_config(tmp_path) == policy.config
  assert_equal(imported(tmp_path, fsdp=2, tensor=2)[1], params)
  written, read = tensors(tmp_path), tensors(GOLDEN / name)
  assert written.keys() == read.keys()
  for tensor, values in read.items():
    assert written[tensor].dtype == values.dtype
    np.testing.assert_array_equal(written[tensor], values)


def test_an_export_from_a_mesh_equals_one_from_a_device(tmp_path):
  policy, params = imported(GOLDEN / SHARDED)
  export(tmp_path / "one", params, policy.config)
  _, spread = imported(GOLDEN / SHARDED, data=2, fsdp=2, tensor=2)
  export(tmp_path / "eight", spread, policy.config)
  for file in ("model.safetensors", "config.json"):
    one = (tmp_path / "one" / file).read_bytes()
    assert one == (tmp_path / "eight" / file).read_bytes()


def test_bfloat16_files_hold_the_nearest_values(tmp_path):
  policy, params = imported(GOLDEN / "qwen3_untied_sharded")
  export(tmp_path, params, policy.config, dtype="bfloat16")
  assert huggingface.stored(tmp_path) == (256, "bfloat16")
  again = imported(tmp_path)[1]
  expected = jax.tree.map(
    lambda x: x.astype("bfloat16").astype("float32"), params
  )
  assert_equal(again, expected)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_an_export_and_computes_the_same(name, tmp_path):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  policy, params = imported(GOLDEN / name)
  export(tmp_path, params, policy.config, max_file_bytes=10_000)
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, dtype=torch.float32, output_loading_info=True
  )
  assert not any(report.values())
  tokens = np.load(GOLDEN / name / "expected.npz")["tokens"]
  with torch.no_grad():
    expected = model(torch.tensor(tokens, dtype=torch.int64)).logits.numpy()
  got = logits(policy, params, tokens)
  np.testing.assert_allclose(got, expected, atol=1e-4)


def test_a_model_is_in_host_memory_once_and_one_weight_more(tmp_path):
  config = transformer.Config(
    vocab_size=256,
    d_model=128,
    num_layers=12,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    d_ff=128,
  )
  policy = transformer.Policy(config)
  params = policy.init(jax.random.key(0))
  export(tmp_path, params, config, max_file_bytes=300_000)
  size = 4 * policy.num_params()
  largest = 4 * max(leaf.size for leaf in jax.tree.leaves(params))
  assert size > 6 * largest
  del params

  def peak(work):
    tracemalloc.start()
    try:
      kept = work()
      return kept, tracemalloc.get_traced_memory()[1]
    finally:
      tracemalloc.stop()

  params, used = peak(lambda: imported(tmp_path, fsdp=2)[1])
  assert used < size + 2 * largest
  again = tmp_path / "again"
  _, used = peak(lambda: export(again, params, config, max_file_bytes=300_000))
  assert used < 4 * largest


def two_words(folder, head, tied):
  """A model of width 2 with 2 words, embedded as unit vectors."""
  config = transformer.Config(
    vocab_size=2,
    d_model=2,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    d_ff=2,
    tied=tied,
  )
  params = transformer.Policy(config).init(jax.random.key(0))
  export(folder, params, config)
  changed = tensors(folder)
  changed["model.embed_tokens.weight"] = np.eye(2, dtype=np.float32)
  changed.pop("lm_head.weight", None)
  if head is not None:
    changed["lm_head.weight"] = np.array(head, np.float32)
  rewrite(folder, changed)


@pytest.mark.parametrize(
  ("tied", "head", "expected"),
  [
    (True, None, [2, 5]),
    (True, [[1, 0], [0, 1]], [2, 5]),
    (False, [[0, 1], [1, 0]], [5, 2]),
  ],
)
def test_H16_the_head_is_the_one_that_the_config_says(
  tied, head, expected, tmp_path
):
  two_words(tmp_path, head, tied)
  policy, params = imported(tmp_path)
  hidden = np.array([2.0, 5.0], np.float32)
  assert policy.logits(params, hidden).tolist() == expected


@pytest.mark.parametrize(
  ("tied", "head", "message"),
  [
    (False, None, "lacks lm_head.weight"),
    (True, [[0, 1], [1, 0]], "lm_head.weight differs from model.embed_tokens"),
    (True, [[1, 0]], "lm_head.weight differs from model.embed_tokens"),
  ],
)
def test_H16_a_head_that_contradicts_the_config_is_refused(
  tied, head, message, tmp_path
):
  two_words(tmp_path, head, tied)
  with pytest.raises(ValueError, match=message):
    imported(tmp_path)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_H17_every_spelling_of_rope_scaling_is_read(
  spelling, section, tmp_path
):
  folder = copied("llama_tied_biases", tmp_path)
  expected = huggingface.read_config(folder)
  scaling = json.loads((folder / "config.json").read_text())["rope_scaling"]
  scaling[spelling] = scaling.pop("type")
  change_config(folder, rope_scaling=None)
  change_config(folder, **{section: scaling})
  config = huggingface.read_config(folder)
  assert config == expected
  assert config.rope_scaling and config.rope_scaling.kind == "llama3"
  assert config.rope_theta == 500.0


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_H17_an_unknown_rope_type_is_an_error(spelling, tmp_path):
  folder = copied("llama_tied_biases", tmp_path)
  change_config(folder, rope_scaling={spelling: "longrope", "factor": 2.0})
  with pytest.raises(ValueError, match=r"'longrope'.*'llama3' or 'yarn'"):
    huggingface.read_config(folder)


def test_rope_scaling_that_lacks_a_number_names_it(tmp_path):
  folder = copied("llama_tied_biases", tmp_path)
  change_config(folder, rope_scaling={"type": "llama3", "factor": 2.0})
  with pytest.raises(ValueError, match="llama3 lacks 'low_freq_factor'"):
    huggingface.read_config(folder)


def test_yarn_is_read_as_it_is_stated():
  config = huggingface.read_config(GOLDEN / "qwen2_untied_yarn")
  assert config.rope_theta == 100.0
  assert config.rope_scaling == Scaling(
    kind="yarn",
    factor=4.0,
    original_length=64,
    low=1.0,
    high=8.0,
    attention_factor=0.1 * math.log(4) + 1.0,
  )


def test_keys_that_old_configs_lack_have_the_values_of_transformers(tmp_path):
  folder = copied("llama_untied_llama3", tmp_path)
  absent = dict.fromkeys(
    ("attention_bias", "mlp_bias", "tie_word_embeddings", "head_dim")
  )
  change_config(folder, **absent, rope_parameters=None)
  config = huggingface.read_config(folder)
  assert (config.attention_bias, config.tied) == (None, False)
  assert (config.head_dim, config.rope_theta) == (24 // 4, 10_000.0)
  assert config.rope_scaling is None


@pytest.mark.parametrize(
  ("stated", "expected"),
  [
    ({}, 0.1 * np.log(4) + 1),
    ({"attention_factor": 1.5}, 1.5),
    (
      {"mscale": 2.0, "mscale_all_dim": 0.5},
      (0.2 * np.log(4) + 1) / (0.05 * np.log(4) + 1),
    ),
  ],
)
def test_yarns_attention_factor_is_stated_or_that_of_the_paper(
  stated, expected, tmp_path
):
  folder = copied("qwen2_untied_yarn", tmp_path)
  scaling = {"type": "yarn", "factor": 4.0, **stated}
  change_config(folder, rope_parameters=None, rope_scaling=scaling)
  config = huggingface.read_config(folder)
  assert config.rope_scaling
  assert config.rope_scaling.attention_factor == pytest.approx(expected)
  assert config.rope_scaling.original_length == 256  # of the whole model


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM.*Qwen3For"),
    ({"architectures": None}, r"architectures is \[\], of model_type 'qwen3'"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"use_sliding_window": True}, "use_sliding_window is True"),
    ({"layer_types": ["sliding_attention"]}, "layer_types is"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"head_dim": None}, "lacks 'head_dim'"),
    ({"rms_norm_eps": None}, "lacks 'rms_norm_eps'"),
    ({"num_key_value_heads": 3}, "num_kv_heads is 3"),
  ],
)
def test_a_config_of_another_computation_names_the_key(
  changes, message, tmp_path
):
  folder = copied(SINGLE, tmp_path)
  change_config(folder, **changes)
  with pytest.raises(ValueError, match=message):
    huggingface.read_config(folder)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2; it must be 1"),
    ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]; it must be empty"),
    ({"moe_intermediate_size": None}, "lacks 'moe_intermediate_size'"),
    ({"num_local_experts": None}, "lacks 'num_experts'"),
    ({"num_experts_per_tok": 5}, "experts_per_token is 5"),
  ],
)
def test_a_config_of_other_experts_names_the_key(changes, message, tmp_path):
  folder = copied(EXPERTS, tmp_path)
  change_config(folder, **changes)
  with pytest.raises(ValueError, match=message):
    huggingface.read_config(folder)


def test_experts_are_read_as_configs_before_version_5_spell_them(tmp_path):
  folder = copied(EXPERTS, tmp_path)
  change_config(folder, num_local_experts=None, num_experts=4)
  config = huggingface.read_config(folder)
  assert config == huggingface.read_config(GOLDEN / EXPERTS)
  assert (config.num_experts, config.experts_per_token) == (4, 2)
  assert config.d_ff == 16
  change_config(folder, norm_topk_prob=None)
  assert not huggingface.read_config(folder).normalize_gates


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda name: without(name), "lacks {}"),
    (
      lambda name: replaced(name, lambda x: x[:-1]),
      r"{} is of shape \(15, 24\); by config.json it must be \(16, 24\)",
    ),
  ],
)
def test_an_expert_that_does_not_fit_is_named(change, message, tmp_path):
  name = "model.layers.1.mlp.experts.3.up_proj.weight"
  folder = copied(EXPERTS, tmp_path)
  rewrite(folder, change(name)(tensors(folder)))
  policy = transformer.Policy(huggingface.read_config(folder))
  with pytest.raises(ValueError, match=message.format(name)):
    huggingface.check(folder, policy)


def test_X08_imported_experts_lie_spread_and_compute_the_same():
  policy, params = imported(GOLDEN / EXPERTS)
  _, spread = imported(GOLDEN / EXPERTS, fsdp=2, tensor=2, expert=2)
  assert_equal(spread, params)
  up = spread["layers"]["feed_forward"]["experts"]["up"]
  assert up.addressable_shards[0].data.shape == (2, 2, 12, 8)
  tokens = np.load(GOLDEN / EXPERTS / "expected.npz")["tokens"]
  tokens = np.tile(tokens, (4, 1))  # Rows divide over fsdp * expert.
  expected = logits(policy, params, tokens)
  with jax.set_mesh(mesh(fsdp=2, tensor=2, expert=2)):
    got = logits(policy, spread, tokens)
  np.testing.assert_allclose(got, expected, atol=1e-5)


def without(name):
  return lambda found: {n: x for n, x in found.items() if n != name}


def replaced(name, change):
  return lambda found: found | {name: change(found[name])}


NORM = "model.layers.1.self_attn.k_norm.weight"
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (without(NORM), f"lacks {NORM}"),
    (
      replaced(UP, lambda x: np.ascontiguousarray(x.T)),
      rf"{UP} is of shape \(24, 40\).*must be \(40, 24\)",
    ),
    (replaced(UP, lambda x: x.astype(np.int8)), f"{UP} is of type I8"),
    (
      lambda found: (
        found | {"model.layers.0.self_attn.q_proj.bias": found[NORM]}
      ),
      "has model.layers.0.self_attn.q_proj.bias.*would leave out",
    ),
    (
      lambda found: {n: x for n, x in found.items() if "layers.1" not in n},
      "layers.1.*and 8 more",
    ),
  ],
)
def test_tensors_that_do_not_fit_are_named_before_any_is_read(
  change, message, tmp_path, monkeypatch
):
  folder = copied(SINGLE, tmp_path)
  rewrite(folder, change(tensors(folder)))
  config = huggingface.read_config(folder)
  monkeypatch.setattr(jax, "device_put", None)
  for refuse in (
    lambda policy: huggingface.check(folder, policy),
    lambda policy: huggingface.load(folder, policy, mesh()),
  ):
    with pytest.raises(ValueError, match=message):
      refuse(transformer.Policy(config))


def test_frequencies_in_old_files_are_passed_over(tmp_path):
  folder = copied("llama_tied_biases", tmp_path)
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  rewrite(folder, tensors(folder) | {name: np.ones(3, np.float32)})
  assert_equal(imported(folder)[1], imported(GOLDEN / folder.name)[1])


def test_a_missing_or_broken_file_is_named(tmp_path):
  shutil.copytree(GOLDEN / SHARDED, tmp_path / "model")
  file = tmp_path / "model" / "model-00002-of-00003.safetensors"
  file.write_bytes(file.read_bytes()[:-4])
  with pytest.raises(ValueError, match="00002-of-00003.*cannot be read"):
    imported(tmp_path / "model")
  file.unlink()
  with pytest.raises(FileNotFoundError, match="00002-of-00003.*not there"):
    imported(tmp_path / "model")
  (tmp_path / "model" / "model.safetensors.index.json").unlink()
  with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
    imported(tmp_path / "model")
  with pytest.raises(FileNotFoundError, match="config.json is not there"):
    imported(tmp_path)


def test_a_policy_that_computes_otherwise_is_refused_though_shapes_fit():
  config = huggingface.read_config(GOLDEN / "llama_untied_llama3")
  other = transformer.Policy(dataclasses.replace(config, rope_scaling=None))
  with pytest.raises(ValueError, match="rope_scaling is None; .*kind='llama3'"):
    huggingface.load(GOLDEN / "llama_untied_llama3", other, mesh())
  narrow = dataclasses.replace(config, compute_dtype="bfloat16")
  huggingface.check(GOLDEN / "llama_untied_llama3", transformer.Policy(narrow))


def test_a_mesh_that_does_not_divide_names_the_tensor():
  with pytest.raises(ValueError, match=r"'key'.*'kv_heads' of size 2.*4 ways"):
    imported(GOLDEN / SINGLE, tensor=4)


def test_what_no_architecture_has_is_not_exported(tmp_path):
  config = transformer.Config(
    vocab_size=2,
    d_model=2,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    d_ff=2,
    attention_bias="qkv",
    qk_norm=True,
  )
  params = transformer.Policy(config).init(jax.random.key(0))
  with pytest.raises(ValueError, match="qk_norm True.*'qkv'.*cannot be export"):
    export(tmp_path / "out", params, config)
  assert not (tmp_path / "out").exists()


def test_H06_an_export_names_every_id_that_ends_an_answer(tmp_path):
  class TwoStops(ByteTokenizer):
    eos_ids = (1, 7)

  policy, params = imported(GOLDEN / SINGLE)
  huggingface.save(
    tmp_path, params, policy.config, TwoStops(), dtype="float32", longest=64
  )
  read = json.loads((tmp_path / "generation_config.json").read_text())
  assert read == {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 7]}


def test_biases_are_not_decayed_and_take_part():
  policy, params = imported(GOLDEN / "llama_tied_biases")
  axes = policy.logical_axes()["layers"]["attention"]
  for name in ("query_bias", "key_bias", "value_bias", "out_bias"):
    assert set(axes[name]) == {"layers", None}
  tokens = np.arange(8)[None]
  before = logits(policy, params, tokens)
  for name in ("query_bias", "key_bias", "value_bias", "out_bias"):
    changed = jax.tree.map(lambda x: x, params)
    changed["layers"]["attention"][name] += 1.0
    assert np.abs(logits(policy, changed, tokens) - before).max() > 1e-3, name
