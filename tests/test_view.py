import io

import rich.console

from rl_tpu import view

ROW = {"reward": 0.5, "staleness_mean": 1.25, "staleness_max": 2.0}


def show(terminal, batches=3):
  file = io.StringIO()
  console = rich.console.Console(
    file=file, force_terminal=terminal, width=80, color_system=None
  )
  shown = view.View(batches, console)
  with shown.open():
    for batch in range(1, batches + 1):
      shown.batch(batch, ROW, seconds_left=61)
  return file.getvalue()


def test_a_plain_log_has_a_line_for_each_batch_under_one_header():
  lines = show(terminal=False).splitlines()[1:]
  assert lines[0].split()[:3] == ["batch", "reward", "held"]
  assert [line.split()[0] for line in lines[1:]] == ["1/3", "2/3", "3/3"]
  cells = lines[1].split()
  assert cells[1:5] == ["0.500", "-", "1.25", "2"]
  assert cells[-1] == "1:01"
  assert max(map(len, lines)) <= 80


def test_a_terminal_shows_the_same_columns_without_cutting_them():
  screen = show(terminal=True)
  for heading, _, _ in view.COLUMNS:
    assert heading in screen
  assert "…" not in screen.split("left: time left")[1]
  assert "3/3" in screen


def test_X07_a_batch_that_is_masked_for_more_than_half_is_warned_of_once():
  file = io.StringIO()
  shown = view.View(9, rich.console.Console(file=file, width=200))
  for batch, masked in enumerate([0.5, 0.6, 0.9, 0.1, 0.7], start=1):
    row = ROW | {"trajectories_masked": masked}
    shown.batch(batch, row, seconds_left=1)
  warnings = [x for x in file.getvalue().splitlines() if "warning" in x]
  assert [w.split(" of the")[0] for w in warnings] == [
    "warning: batch 2: 60%",
    "warning: batch 5: 70%",
  ]


def test_long_times_are_in_hours():
  assert view.clock(59.6) == "1:00"
  assert view.clock(3725) == "1h02"
