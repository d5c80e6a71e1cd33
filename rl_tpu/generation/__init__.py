"""Continuous batching on JetStream's interfaces: sampling, engine, driver."""
