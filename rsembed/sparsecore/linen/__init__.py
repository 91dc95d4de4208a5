"""Flax Linen layers, named as in jax-tpu-embedding."""
