"""Checks on public rows, before the first private row is read."""
