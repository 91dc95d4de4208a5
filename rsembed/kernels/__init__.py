"""Device code for each kind of hardware: lookup, row gradients and update on flat arrays."""
