"""The stored tensors of each kind."""
