"""Flax NNX layers, named as in jax-tpu-embedding."""
