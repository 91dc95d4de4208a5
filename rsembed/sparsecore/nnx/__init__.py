"""Flax NNX layers under the published names."""
