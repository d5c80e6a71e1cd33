"""Agents that speak an OpenAI-compatible chat API, recorded as trajectories.

`Stage.play` plays an episode of an environment or of an agent (`envs.Agent`).
"""

from rl_tpu.agents.stage import Played, Stage

__all__ = ["Played", "Stage"]
