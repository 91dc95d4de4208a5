"""The device side: lookup, row gradients and update on flat arrays; the only room that knows hardware."""
