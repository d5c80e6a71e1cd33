"""What an answer is worth: a function of its text and of the row asked."""


def score(answer: str, row: dict[str, str]) -> dict[str, float]:
  """Returns 1 for the row's digits in ascending order, else 0.

  Other numbers than `reward` are not trained on: metrics.csv has their means,
  here `env_descending` and `env_right_length`.
  """
  ascending = "".join(sorted(row["digits"]))
  return {
    "reward": float(answer == ascending),
    "descending": float(answer == ascending[::-1]),
    "right_length": float(len(answer) == len(ascending)),
  }
