"""The tensors that a run trains on and is evaluated on, and the readers of their files."""
