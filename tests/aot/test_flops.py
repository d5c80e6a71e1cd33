"""Hand counts of what models with experts cannot do without."""

import dataclasses

import pytest

from rl_tpu.aot import flops, hlo
from rl_tpu.models import transformer

MOE = transformer.Config(
  vocab_size=100,
  d_model=8,
  num_layers=3,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  d_ff=5,
  num_experts=6,
  experts_per_token=2,
  tied=False,
  qk_norm=False,
)
# By layer: two norms, q and out of 8 x 8, k and v of 8 x 4, the router.
SHARED = 3 * (2 * 8 + 2 * 64 + 2 * 32 + 8 * 6) + 8  # and the last norm
HEAD = 100 * 8
EXPERT = 3 * 8 * 5


def test_a_token_passes_its_own_experts_only():
  assert flops.weights(MOE) == (SHARED + HEAD, 3 * 6 * EXPERT)
  assert flops.multiplying(MOE) == SHARED + HEAD + 3 * 2 * EXPERT
  assert flops.multiplying(MOE, head=False) == SHARED + 3 * 2 * EXPERT
  all_of_them = dataclasses.replace(MOE, experts_per_token=6)
  assert flops.multiplying(all_of_them) == SHARED + HEAD + 3 * 6 * EXPERT
  dense = dataclasses.replace(MOE, num_experts=0, experts_per_token=0)
  assert flops.multiplying(dense) == SHARED - 3 * 48 + HEAD + 3 * EXPERT


def test_a_forward_pass_counts_active_weights_and_causal_pairs():
  active = SHARED + HEAD + 3 * 2 * EXPERT
  attention = 2 * 3 * 2 * 4 * 7**2  # 2 L H h T^2
  assert flops.forward(MOE, 5, 7) == 5 * (2 * active * 7 + attention)


def test_few_choices_reach_few_experts_and_many_reach_all():
  assert flops.touched(128, 1) == pytest.approx(1 / 128)
  assert flops.touched(128, 64) == pytest.approx(1 - (127 / 128) ** 64)
  assert flops.touched(128, 1e6) == pytest.approx(1)
  assert flops.touched(0, 64) == 0


def grouped(name, result, layout, more=""):
  """A call of a grouped kernel on a device."""
  return hlo.Op(
    name=name,
    opcode="custom-call",
    shape=f"bf16[{result}]{{1,0}}",
    operands=(),
    rest=f"(), operand_layout_constraints={{{layout}}}, {more}",
    is_root=False,
  )


# 4096 rows in 8 tiles of 512, of 4 experts.
NUMBERS = "s32[5]{0}, s32[11]{0}, s32[11]{0}, s32[1]{0}"


@pytest.mark.parametrize(
  ("name", "result", "arrays"),
  [
    ("gmm.1", "4096,384", "bf16[4096,256]{1,0}, bf16[4,256,384]{2,1,0}"),
    ("gmm.2", "4096,256", "bf16[4096,384]{1,0}, bf16[4,256,384]{2,1,0}"),
    (
      "transpose_jvp_jit_tgmm___.3",
      "4,256,384",
      "bf16[4096,256]{1,0}, bf16[4096,384]{1,0}",
    ),
  ],
)
def test_a_grouped_product_multiplies_each_row_by_one_expert(
  name, result, arrays
):
  op = grouped(name, result, f"{NUMBERS}, {arrays}")
  found = flops.kernel(op, experts=4)
  assert found is not None
  padded = 4096 + 3 * 512  # a tile that two experts share is taken twice
  assert found.flops == 2 * padded * 256 * 384
  assert found.bytes == pytest.approx(
    2 * (4 * 256 * 384 + 4096 * (256 + 384)), rel=1e-6
  )
  assert flops.kernel(op) is None


def test_a_device_has_its_share_of_rows_and_reads_experts_that_some_chose():
  layout = f"{NUMBERS}, bf16[4096,256]{{1,0}}, bf16[4,256,384]{{2,1,0}}"
  found = flops.kernel(grouped("gmm", "4096,384", layout), experts=16)
  assert found is not None
  assert found.flops == 2 * (1024 + 3 * 512) * 256 * 384
  few = "s32[5]{0}, s32[4]{0}, bf16[8,256]{1,0}, bf16[4,256,384]{2,1,0}"
  read = flops.kernel(grouped("gmm", "8,384", few), experts=16)
  assert read is not None
  weights = flops.touched(16, 8) * 4 * 256 * 384
  assert read.bytes == pytest.approx(2 * (weights + 2 * (256 + 384)))


def test_a_tile_that_does_not_divide_the_outputs_costs_what_it_covers():
  layout = f"{NUMBERS}, bf16[4096,256]{{1,0}}, bf16[4,256,384]{{2,1,0}}"
  tiles = 'frontend_attributes={ragged_dot_tiling="128,256,256"}'
  op = grouped("ragged-dot-none.2", "4096,384", layout, tiles)
  found = flops.kernel(op, experts=4)
  assert found is not None
  assert found.flops == 2 * (4096 + 3 * 512) * 256 * 512


def test_a_gather_reads_and_writes_what_it_gives():
  op = hlo.Op("gather.1", "fusion", "bf16[10,64]{1,0}", (), "", False)
  assert flops.kernel(op) == flops.Kernel(flops=0.0, bytes=2 * 10 * 64 * 2)
