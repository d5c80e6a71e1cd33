"""Asynchronous reinforcement learning for language models on TPUs, in JAX."""
