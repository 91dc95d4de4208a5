"""Flax Linen layers under the published names."""
