"""What the reader makes of compiled text; the texts are cut from libtpu's."""

import dataclasses

import numpy as np
import pytest

from rl_tpu import topology
from rl_tpu.aot import flops, hlo, kernels

LOOPS = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={()->f32[8]{0}}

%inner_cond (p.1: (s32[], f32[8])) -> pred[] {
  %constant.5 = s32[]{:T(128)} constant(5)
  %p.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %gte.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%gte.1, %constant.5), direction=LT
}

%inner_body (p.2: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %x.2 = f32[8]{0:T(128)} get-tuple-element(%p.2), index=1
  %i.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  %add.2 = f32[8]{0:T(128)} fusion(%x.2), kind=kLoop, calls=%never, \
metadata={op_name="jit(f)/while/body/while/body/mul"}, \
backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %tuple.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%i.2, %add.2)
}

%never (q: f32[8]) -> f32[8] {
  ROOT %q = f32[8]{0:T(128)} parameter(0), \
backend_config={"window_config":{"estimated_cycles":"999"}}
}

%outer_cond (p.3: (s32[], f32[8])) -> pred[] {
  %constant.3 = s32[]{:T(128)} constant(3)
  %p.3 = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %gte.3 = s32[]{:T(128)} get-tuple-element(%p.3), index=0
  ROOT %lt.3 = pred[]{:T(512)} compare(%gte.3, %constant.3), direction=LT
}

%outer_body (p.4: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.4 = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %x.4 = f32[8]{0:T(128)} get-tuple-element(%p.4), index=1
  %zero = s32[]{:T(128)} constant(FIRST)
  %copy.4 = s32[]{:T(128)} copy(%zero)
  %tuple.4 = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%copy.4, %x.4)
  ROOT %while.4 = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%tuple.4), \
condition=%inner_cond, body=%inner_body
}

ENTRY %main (p.5: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.5 = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %multiply.5 = f32[8]{0:T(128)} multiply(%p.5, %p.5), \
backend_config={"window_config":{"estimated_cycles":"7"}}
  ROOT %while.5 = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%p.5), \
condition=%outer_cond, body=%outer_body
}
"""


def test_cycles_count_once_for_each_turn_of_every_loop_around_them():
  program = hlo.read(LOOPS.replace("FIRST", "0"))
  assert program.cycles == 7 + 3 * 5 * 100
  assert program.unknown == []
  dearest, times = max(program.ops, key=lambda op: op[0].cycles)
  assert (dearest.name, times) == ("add.2", 15)
  assert dearest.source == "while/body/mul"


def test_a_loop_that_does_not_start_from_0_turns_less_often():
  assert hlo.read(LOOPS.replace("FIRST", "2")).cycles == 7 + 3 * 3 * 100


@pytest.mark.parametrize(
  ("known", "unknown"),
  [
    ("s32[]{:T(128)} constant(5)", "s32[]{:T(128)} parameter(1)"),
    ("%constant.5), direction=LT", "%constant.5), direction=NE"),
  ],
)
def test_a_loop_whose_trip_count_the_text_does_not_give_is_named(
  known, unknown
):
  text = LOOPS.replace("FIRST", "0")
  assert known in text
  text = text.replace(known, unknown)
  assert hlo.read(text).unknown == ["while.4"]
  bounded = hlo.read(text, most_turns=2)
  assert bounded.unknown == []
  assert bounded.cycles == 7 + 3 * 2 * 100


GATHER = (
  "all-gather(%param_0), channel_id=107, replica_groups="
  "mesh['axis_0'=16,'axis_1'=1] {'axis_0'}, dimensions={1}"
)
FUSIONS = f"""\
HloModule jit_f, is_scheduled=true

%start (param_0: bf16[1,64]) -> bf16[1,1024] {{
  %param_0 = bf16[1,64]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %gather.1 = bf16[1,1024]{{1,0:T(8,128)}} {GATHER}
  ROOT %c.1 = (bf16[1,1024]{{1,0}}, u32[]{{:S(2)}}) custom-call(%gather.1), \
custom_call_target="AsyncCollectiveStart"
}}

%done (param_0: bf16[1,64]) -> bf16[1,1024] {{
  %param_0 = bf16[1,64]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %gather.2 = bf16[1,1024]{{1,0:T(8,128)}} {GATHER}
  ROOT %c.2 = bf16[1,1024]{{1,0}} custom-call(%param_0, %gather.2), \
custom_call_target="AsyncCollectiveDone"
}}

%all-reduce-scatter.1 (param_0: f32[32]) -> f32[2] {{
  %param_0 = f32[32]{{0:T(128)}} parameter(0)
  %sum.1 = f32[32]{{0:T(128)}} all-reduce(%param_0), channel_id=3, \
replica_groups=[1,16]<=[16], to_apply=%add
  ROOT %slice.1 = f32[2]{{0:T(128)}} dynamic-slice(%sum.1)
}}

ENTRY %main (p.1: bf16[1,64], p.2: f32[32]) -> f32[8] {{
  %p.1 = bf16[1,64]{{1,0}} parameter(0)
  %p.2 = f32[32]{{0}} parameter(1)
  %fusion.1 = (bf16[1,1024]{{1,0}}, u32[]{{:S(2)}}) fusion(%p.1), calls=%start
  %fusion.2 = bf16[1,1024]{{1,0}} fusion(%p.1), calls=%done
  %fusion.3 = f32[2]{{0}} fusion(%p.2), calls=%all-reduce-scatter.1
  %kernel.1 = (f32[512,128]{{1,0:T(8,128)}}, bf16[16,2048,128]{{2,1,0}}) \
custom-call(%p.1, /*index=5*/%p.2), custom_call_target="tpu_custom_call", \
frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 512, \\"q_layout\\": 1}}"
}}}}, metadata={{op_name="jit(f)/splash"}}
  ROOT %sum.2 = f32[8]{{0}} all-reduce(%p.2), channel_id=4, \
replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, to_apply=%add
}}
"""


def test_an_asynchronous_collective_counts_once_for_all_its_fusions():
  gathers = [c for c in hlo.read(FUSIONS).collectives if c.kind == "all-gather"]
  assert [(g.moved, g.times) for g in gathers] == [(1024 * 2 * 15 // 16, 1)]


def test_a_sum_of_which_each_device_keeps_its_part_is_a_reduce_scatter():
  found = {c.kind: c for c in hlo.read(FUSIONS).collectives}
  assert found["reduce-scatter"].moved == 32 * 4 * 15 // 16
  assert found["all-reduce"].moved == 2 * 8 * 4 * 3 // 4


def test_attributes_that_run_over_several_lines_belong_to_their_instruction():
  ((kernel, times),) = hlo.read(FUSIONS).kernels
  assert (kernel.name, times) == ("kernel.1", 1)
  assert kernel.operands == ("p.1", "p.2")
  assert kernel.source == "jit(f)/splash"
  assert kernel.shape.startswith("(f32[512,128]")


@pytest.mark.parametrize(
  ("text", "groups"),
  [
    ("replica_groups={{0,2},{1,3}}, x=1", [[0, 2], [1, 3]]),
    ("replica_groups=[2,2]<=[4], x=1", [[0, 1], [2, 3]]),
    ("replica_groups=[2,2]<=[2,2]T(1,0), x=1", [[0, 2], [1, 3]]),
    ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x=1", [[0, 2], [1, 3]]),
    ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
    ("replica_groups=mesh['a'=4,'b'=1] {'a':(1)2}", [[0, 2], [1, 3]]),
    ("replica_groups=mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
    ("source_target_pairs={{0,1},{1,0}}, x=1", [[0, 1], [1, 0]]),
    ("dimensions={0}", [[]]),
  ],
)
def test_who_takes_part_is_read_from_every_way_to_write_it(text, groups):
  np.testing.assert_array_equal(hlo.replica_groups(text), groups)


def test_what_is_no_module_is_refused():
  with pytest.raises(ValueError, match="no ENTRY computation"):
    hlo.read("hello")


def test_one_branch_of_a_conditional_counts_the_dearest_unless_told():
  text = """\
%a (p.1: f32[8]) -> f32[8] {
  ROOT %n.1 = f32[8]{0} negate(%p.1), backend_config={"estimated_cycles":"2"}
}
%b (p.2: f32[8]) -> f32[8] {
  ROOT %n.2 = f32[8]{0} negate(%p.2), backend_config={"estimated_cycles":"5"}
}
ENTRY %main (p.3: f32[8], i: s32[]) -> f32[8] {
  ROOT %c = f32[8]{0} conditional(%i, %p.3, %p.3), branch_computations={%a, %b}
}
"""
  assert hlo.read(text).cycles == 5
  assert hlo.read(text, cheap_branches=True).cycles == 2


def kernel(name, queries, blocks="4,4", keys="bf16[2,256,128]{2,1,0}"):
  shapes = f"s8[1,{blocks}]{{2,1,0}}, {queries}, {keys}"
  text = f"(), operand_layout_constraints={{{shapes}}}, x=1"
  return hlo.Op(
    name=name,
    opcode="custom-call",
    shape="",
    operands=(),
    rest=text,
    is_root=False,
  )


def test_a_kernel_takes_all_blocks_that_are_not_above_the_diagonal():
  queries = "bf16[4,256,128]{2,1,0}"
  every = 2 * 4 * 256**2 * 128  # operations of one product, unmasked
  known = flops.kernel(kernel("splash_mha_fwd.3", queries))
  assert known == flops.Kernel(flops=2 * every * 10 / 16, size=128)
  wide = flops.kernel(kernel("splash_mha_dkv_x", queries, blocks="4,2"))
  assert wide is not None and wide.flops == 4 * every * 6 / 8
  partial = kernel("splash_mha_dkv_x", queries, blocks="4,2")
  partial = dataclasses.replace(partial, shape="(f32[9,9], bf16[3,4,256,128])")
  fused = flops.kernel(partial)
  assert fused is not None and fused.flops == 5 * every * 6 / 8
  batched = "bf16[2,4,256,128]{3,2,1,0}"
  two = flops.kernel(kernel("splash_mha_fwd", batched))
  assert two is not None and two.flops == 2 * known.flops
  assert flops.kernel(kernel("another", queries)) is None


def test_queries_behind_a_cache_see_all_of_it():
  keys = "bf16[2,768,128]{2,1,0}"
  queries = "bf16[4,256,128]{2,1,0}"
  every = 2 * 4 * 256 * 768 * 128
  named = flops.kernel(kernel("splash_mha_fwd", queries, "2,6", keys))
  assert named is not None and named.flops == 2 * every * 11 / 12


def test_decoding_reads_every_page_and_cores_share_the_wait():
  constraints = (
    "s32[64]{0}, s32[128]{0}, s32[1]{0}, s32[1]{0}, f32[64,2,1,128]{3,2,1,0}, "
    "bf16[1,3584,2048,128]{3,2,1,0}, bf16[1,3584,2048,128]{3,2,1,0}"
  )
  reads = hlo.Op(
    name="paged_attention.1",
    opcode="custom-call",
    shape="",
    operands=(),
    rest=f"(), operand_layout_constraints={{{constraints}}}",
    is_root=False,
  )
  one, two = topology.CHIPS["v5e"], topology.CHIPS["v5p"]
  transfer = 128 * 2 * 2 * 2048 * 128 / kernels.SHARE
  assert kernels.seconds(reads, one) == pytest.approx(
    transfer / one.bandwidth + 128 * kernels.WAIT
  )
  assert kernels.seconds(reads, two) == pytest.approx(
    transfer / two.bandwidth + 64 * kernels.WAIT
  )
  assert kernels.seconds(kernel("another", ""), one) is None


MOVES = """\
HloModule jit_g, is_scheduled=true

%written (held: bf16[28,32,64], at: s32[8,2], new: bf16[8,64]) -> \
bf16[28,32,64] {
  %held = bf16[28,32,64]{2,1,0} parameter(0)
  %at = s32[8,2]{1,0} parameter(1)
  %new = bf16[8,64]{1,0} parameter(2)
  %turned = bf16[8,64]{1,0} transpose(%new), dimensions={0,1}
  ROOT %scatter.1 = bf16[28,32,64]{2,1,0} scatter(%held, %at, %turned), \
to_apply=%last
}

%taken (table: bf16[100,64], at: s32[8,1]) -> bf16[8,64] {
  %table = bf16[100,64]{1,0} parameter(0)
  %at = s32[8,1]{1,0} parameter(1)
  ROOT %gather.1 = bf16[8,64]{1,0} gather(%table, %at), slice_sizes={1,64}
}

ENTRY %main (p.1: bf16[28,32,64], p.2: s32[8,2], p.3: bf16[100,64]) -> \
bf16[28,32,64] {
  %p.1 = bf16[28,32,64]{2,1,0} parameter(0)
  %p.2 = s32[8,2]{1,0} parameter(1)
  %p.3 = bf16[100,64]{1,0} parameter(2)
  %gather_fusion = bf16[8,64]{1,0} fusion(%p.3, %p.2), kind=kCustom, \
calls=%taken
  ROOT %scatter_fusion = bf16[28,32,64]{2,1,0} fusion(%p.1, %p.2, \
%gather_fusion), kind=kCustom, calls=%written
}
"""


def test_a_scatter_writes_its_updates_in_place_and_a_gather_what_it_gives():
  found = {op.name: op for op, _ in hlo.read(MOVES).kernels}
  assert set(found) == {"gather_fusion", "scatter_fusion"}
  for op in found.values():
    assert flops.kernel(op) == flops.Kernel(flops=0.0, bytes=2 * 8 * 64 * 2)
