"""Settings to copy: a project, its clusters and its storage, none of them real.

python -m launch gke --settings=launch/example.py --config=FILE --dry_run
"""

import ml_collections

from launch.settings import Settings
from rl_tpu.config import to_config_dict


def get_config() -> ml_collections.ConfigDict:
  """Settings for every backend; each takes what it needs."""
  return to_config_dict(
    Settings(
      name="example",
      generators=4,
      project="my-project",
      zone="us-east5-a",
      cluster="my-cluster",
      image="us-east5-docker.pkg.dev/my-project/rl/rl_tpu:1",
      nfs="10.0.0.2:/share",
      storage="my-filestore",
      artifacts="gs://my-bucket/pathways",
      token_secret="rl-tpu",
      token_file="/shared/secrets/rl_tpu",
    )
  )
