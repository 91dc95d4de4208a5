"""Tables whose rows belong to 64-bit keys and live on the devices of a mesh."""
