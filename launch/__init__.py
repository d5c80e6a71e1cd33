"""Starts runs: here, on TPU VMs, on Kubernetes; see README.md beside this file.

It knows rl_tpu; rl_tpu does not know who launches it.
"""
