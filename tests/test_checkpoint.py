import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.path import atomicity

from rl_tpu import checkpoint, sharding
from rl_tpu.types import Chunk, Group, Prompt, Trajectory, Turn


def trajectory(index, member, length=5):
  mask = np.arange(length) >= 2
  return Trajectory(
    prompt_id=index,
    group_id=index,
    member=member,
    tokens=np.arange(length, dtype=np.int32) + 10 * member,
    action_mask=mask,
    behavior_logp=np.where(mask, -0.5 - member, 0).astype(np.float32),
    token_version=np.where(mask, 4, -1).astype(np.int32),
    rewards=np.eye(length, dtype=np.float32)[-1],
    temperature=0.7,
    stop_reason="length" if member else "stop",
    metrics={"tool_calls": 2.0} if member else {},
  )


def group(index):
  return Group(
    prompt=Prompt(
      index=index,
      tokens=np.array([0, 1], np.int32),
      metadata={"question": f"q{index}=", "source_index": 3},
    ),
    trajectories=tuple(trajectory(index, m, 4 + m) for m in range(2)),
  )


def state(value=1.0):
  return {"w": jnp.full((4, 4), value), "count": jnp.int32(3)}


def abstract(mesh=None):
  where = sharding.named(
    mesh or sharding.make_mesh(sharding.MeshShape(), jax.devices())
  )
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state()
  )


def save(path, *versions, groups=()):
  saver = checkpoint.Checkpointer(path, keep=10)
  arrays, described = checkpoint.pack_groups(groups)
  for version in versions:
    meta = {"groups": described, "actor": {"next_index": version}}
    saver.save(version, state(version), arrays, meta)
  saver.close()


def restore(path, mesh=None):
  saver = checkpoint.Checkpointer(path)
  try:
    return saver.restore_latest(abstract(mesh))
  finally:
    saver.close()


@pytest.mark.parametrize("groups", [[], [group(3), group(7)]])
def test_everything_comes_back_as_it_was_saved(tmp_path, groups):
  save(tmp_path, 1, 2, groups=groups)
  got = restore(tmp_path)
  assert got.version == 2
  assert got.meta["actor"] == {"next_index": 2}
  np.testing.assert_array_equal(got.state["w"], state(2)["w"])
  assert got.state["count"].dtype == jnp.int32
  back = checkpoint.unpack_groups(got.host, got.meta["groups"])
  assert len(back) == len(groups)
  for one, other in zip(back, groups, strict=True):
    assert one.prompt.metadata == other.prompt.metadata
    assert one.prompt.index == other.prompt.index
    for t, u in zip(one.trajectories, other.trajectories, strict=True):
      for name in ("prompt_id", "group_id", "member", "temperature"):
        assert getattr(t, name) == getattr(u, name)
      assert t.stop_reason == u.stop_reason
      assert t.metrics == u.metrics
      for name in ("tokens", "action_mask", "behavior_logp", "rewards"):
        np.testing.assert_array_equal(getattr(t, name), getattr(u, name))
      assert t.tokens.dtype == np.int32
      assert t.action_mask.dtype == bool


def test_unfinished_episodes_come_back_with_their_tokens(tmp_path):
  def chunk(first, count, stop_reason, size):
    tokens = np.arange(first, first + count, dtype=np.int32)
    head = np.tile(tokens[:, None], size)
    return Chunk(
      tokens=tokens,
      logp=(-tokens / 7).astype(np.float32),
      version=first,
      stop_reason=stop_reason,
      topk_ids=head if size else None,
      topk_logp=(-head / 9).astype(np.float32) if size else None,
    )

  def turn(observation, *chunks):
    return Turn(observation=np.array(observation, np.int32), chunks=[*chunks])

  cut = turn([4, 5], chunk(3, 2, None, 2), chunk(6, 1, None, 2))
  done = turn([1], chunk(8, 3, "stop", 0))
  progress = {5: [[], [cut]], 9: [[done, turn([2, 2])], []]}
  arrays, described = checkpoint.pack_progress(progress)
  saver = checkpoint.Checkpointer(tmp_path)
  saver.save(1, state(), arrays, {"progress": described})
  saver.close()
  got = restore(tmp_path)
  back = checkpoint.unpack_progress(got.host, got.meta["progress"])

  def plain(turn):
    return turn.observation.tolist(), [
      {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in dataclasses.asdict(one).items()
      }
      for one in turn.chunks
    ]

  assert list(back) == [5, 9]
  for index, members in progress.items():
    for turns, others in zip(members, back[index], strict=True):
      assert [*map(plain, others)] == [*map(plain, turns)]
  assert back[5][1][0].chunks[0].tokens.dtype == np.int32


def headed(one, size):
  """The group with a sampler's head of `size` in each trajectory but one."""
  first, *rest = one.trajectories
  trajectories = [first]
  for t in rest:
    ids = np.arange(len(t) * size, dtype=np.int32).reshape(-1, size)
    ids += t.prompt_id - 4
    logp = np.where(t.action_mask[:, None], -ids / 3, -np.inf)
    trajectories.append(
      dataclasses.replace(
        t, behavior_topk_ids=ids, behavior_topk_logp=logp.astype(np.float32)
      )
    )
  return dataclasses.replace(one, trajectories=tuple(trajectories))


def test_samplers_heads_come_back_to_their_trajectories(tmp_path):
  groups = [headed(group(3), 4), group(5), headed(group(7), 4)]
  save(tmp_path, 1, groups=groups)
  got = restore(tmp_path)
  back = checkpoint.unpack_groups(got.host, got.meta["groups"])
  kept = 0
  for one, other in zip(back, groups, strict=True):
    for t, u in zip(one.trajectories, other.trajectories, strict=True):
      np.testing.assert_array_equal(t.tokens, u.tokens)
      for name in ("behavior_topk_ids", "behavior_topk_logp"):
        mine, theirs = getattr(t, name), getattr(u, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
          np.testing.assert_array_equal(mine, theirs)
          assert mine.dtype == theirs.dtype
          kept += 1
  assert kept == 4


def test_nothing_saved_is_nothing_restored(tmp_path):
  assert restore(tmp_path) is None


def test_H23_a_version_that_lacks_a_part_is_passed_over(tmp_path, caplog):
  save(tmp_path, 20, 40)
  part = tmp_path / "40" / "meta"
  part.rename(tmp_path / "gone")
  (tmp_path / "50").mkdir()
  (tmp_path / "60.partial").mkdir()
  with caplog.at_level(logging.WARNING, logger="root"):
    got = restore(tmp_path)
  assert got.version == 20
  assert got.meta["actor"] == {"next_index": 20}
  warned = [r.message for r in caplog.records if "passed over" in r.message]
  assert len(warned) == 2
  assert "checkpoint 50" in warned[0]
  assert "checkpoint 40" in warned[1] and "meta" in warned[1]


def test_X16_a_state_is_restored_to_the_sharding_asked_for(tmp_path):
  save(tmp_path, 1)
  mesh = sharding.make_mesh(sharding.MeshShape(fsdp=2, tensor=2), jax.devices())
  got = restore(tmp_path, mesh)
  assert got.state["w"].sharding.device_set == set(jax.devices()[:4])


def test_weights_alone_come_back(tmp_path):
  checkpoint.save_params(tmp_path / "weights", state(5.0))
  got = checkpoint.restore_params(tmp_path / "weights", abstract())
  np.testing.assert_array_equal(got["w"], state(5.0)["w"])


def test_versions_that_were_passed_over_make_way(tmp_path):
  save(tmp_path, 20, 40)
  (tmp_path / "50").mkdir()
  (tmp_path / "40" / "meta").rename(tmp_path / "gone")
  saver = checkpoint.Checkpointer(tmp_path)
  assert saver.restore_latest(abstract()).version == 20
  arrays, _ = checkpoint.pack_groups([])
  saver.save(40, state(40.0), arrays, {})
  saver.close()
  assert restore(tmp_path).version == 40
  assert sorted(path.name for path in tmp_path.glob("[0-9]*")) == ["20", "40"]


def test_a_versions_state_is_saved_once_and_the_rest_as_it_was_last(tmp_path):
  save(tmp_path, 3)
  saver = checkpoint.Checkpointer(tmp_path)
  assert saver.restore_latest(abstract()).version == 3
  for more in range(4):
    arrays, described = checkpoint.pack_groups([group(n) for n in range(more)])
    meta = {"groups": described, "actor": {"next_index": more}}
    version = 3 if more < 2 else 4
    saver.save(version, state(float(10 * version + more)), arrays, meta)
    if more == 1:
      got = restore(tmp_path)
      assert got.version == 3
      assert got.meta["actor"] == {"next_index": 1}
      np.testing.assert_array_equal(got.state["w"], state(3.0)["w"])
  saver.close()
  got = restore(tmp_path)
  assert got.version == 4
  np.testing.assert_array_equal(got.state["w"], state(42.0)["w"])
  again = checkpoint.unpack_groups(got.host, got.meta["groups"])
  assert [one.prompt.index for one in again] == [0, 1, 2]


def test_X17_a_save_that_failed_in_the_background_raises_by_the_next(
  tmp_path, monkeypatch
):
  def full(self, directory):
    raise OSError("the disk is full")

  saver = checkpoint.Checkpointer(tmp_path)
  arrays, _ = checkpoint.pack_groups([])
  saver.save(1, state(1.0), arrays, {})
  saver._manager.wait_until_finished()
  with monkeypatch.context() as patch:
    patch.setattr(ocp.PyTreeCheckpointHandler, "finalize", full)
    saver.save(2, state(2.0), arrays, {})
    with pytest.raises(OSError, match="the disk is full"):
      saver.save(3, state(3.0), arrays, {})
  saver.close()
  assert restore(tmp_path).version == 1


def test_weights_that_another_process_wrote_first_stay(tmp_path):
  for value in (5.0, 6.0):
    checkpoint.save_params(tmp_path / "weights", state(value))
  got = checkpoint.restore_params(tmp_path / "weights", abstract())
  np.testing.assert_array_equal(got["w"], state(5.0)["w"])
  assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def round_trip(path, state, template):
  saver = checkpoint.Checkpointer(path)
  saver.save(1, state, {"none": np.zeros(1)}, {})
  saver.close()
  reader = checkpoint.Checkpointer(path)
  try:
    return reader.restore_latest(template).state
  finally:
    reader.close()


def like(tree):
  where = sharding.named(
    sharding.make_mesh(sharding.MeshShape(), jax.devices())
  )
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree
  )


def test_H24_keys_come_back_as_keys_and_integers_as_integers(tmp_path):
  state = {"key": jax.random.key(42), "by_number": {0: jnp.ones(2), 1: 2.0}}
  state["by_number"][1] = jnp.full(3, 2.0)
  got = round_trip(tmp_path, state, like(state))
  assert str(got["key"].dtype) == "key<fry>"
  assert float(jax.random.uniform(got["key"])) == np.float32(0.48870957)
  assert set(got["by_number"]) == {0, 1}
  np.testing.assert_array_equal(got["by_number"][1], np.full(3, 2.0))


def test_H24_a_key_of_another_generator_is_not_taken_for_ours(tmp_path):
  state = {"key": jax.random.key(42, impl="rbg")}
  with pytest.raises(ValueError, match=r"'key'.*key<rbg>.*key<fry>"):
    round_trip(tmp_path, state, like({"key": jax.random.key(0)}))


def test_X17_a_save_that_failed_behind_the_run_raises_by_the_next(
  tmp_path, monkeypatch
):
  def full(*_, **__):
    raise OSError("no space left on device")

  saver = checkpoint.Checkpointer(tmp_path)
  with monkeypatch.context() as patched:
    patched.setattr(atomicity.AtomicRenameTemporaryPath, "finalize", full)
    saver.save(1, state(), {"none": np.zeros(1)}, {})
    with pytest.raises(OSError, match="no space left"):
      saver.save(2, state(), {"none": np.zeros(1)}, {})
