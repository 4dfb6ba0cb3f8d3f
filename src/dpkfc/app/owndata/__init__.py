"""Data of users: files, their public schema, and the recipes that are made of them."""
