"""Recipes that exist for a table or figure of a paper."""
