"""Recipes: data, a model, public constants and defaults, by name."""
