"""Lookup, row gradients and update on flat arrays, implemented for each kind of hardware."""
