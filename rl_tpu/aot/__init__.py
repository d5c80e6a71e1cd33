"""Compiling a run's programs for TPUs that nobody here owns, on a CPU."""
