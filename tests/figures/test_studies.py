"""The studies of experiments/: their runs build, their judges take any rows."""

import pathlib
import random

import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments import exact
from rl_tpu import algorithms, figures, parts
from rl_tpu.config import build

ROOT = pathlib.Path(__file__).parents[2] / "experiments"
TRAINED = [s for s in figures.find(ROOT) if hasattr(s.module, "COLUMNS")]


@pytest.fixture(params=TRAINED, ids=lambda study: study.name)
def study(request):
  return request.param


@pytest.mark.parametrize("scale", ["smoke", "cpu"])
def test_every_run_of_a_study_has_a_config_that_builds(
  study, scale, monkeypatch
):
  built = []

  def rows_of(config, columns, every):
    build(parts.Config, config)
    built.append(config.to_json())
    assert config.batches % every == 0
    return [{"batch": every}]

  monkeypatch.setattr(study.module.training, "rows_of", rows_of)
  for cell in study.cells(scale):
    study.module.measure(dict(cell), scale)
  assert len(set(built)) == len(study.cells(scale))


@pytest.mark.parametrize("scale", ["smoke", "cpu"])
def test_whatever_was_measured_is_judged_and_drawn(study, scale):
  """Figures drawn by lot, with evaluations in every other row only."""
  drawn = random.Random(0)
  rows = [
    cell
    | {"batch": batch}
    | {
      name: drawn.random()
      for name in study.module.COLUMNS
      if name != "heldout_accuracy" or batch % 8 == 0
    }
    for cell in study.cells(scale)
    for batch in range(4, 97, 4)
  ]
  for claim in study.claims.values():
    assert claim.judge(rows).seen
  figure = plt.figure()
  study.module.draw(rows, figure)
  figure.canvas.draw()
  plt.close(figure)
  assert all(axes.get_xlabel() for axes in figure.axes)


def test_the_push_of_a_mask_is_the_ratio_within_its_band_and_nothing_outside():
  module = algorithms.get("sao")
  ratios = np.array([0.69, 0.71, 1.0, 5.9, 6.1])
  for advantage in (1.0, -2.0):
    found = exact.push(module, module.Config(band="math"), ratios, advantage)
    expected = advantage * np.array([0, 0.71, 1.0, 5.9, 0])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_push_of_decoupled_ppo_is_clipped_around_the_proximal_policy():
  module = algorithms.get("decoupled_ppo")
  ratios = np.array([1.5 * 1.19, 1.5 * 1.21])
  found = exact.push(module, module.Config(), ratios, 1.0, moved=1.5)
  np.testing.assert_allclose(found, [ratios[0], 0.0], rtol=1e-5)
