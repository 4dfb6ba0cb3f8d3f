"""Tiny architectures, each compared with a plain loop over single examples."""
