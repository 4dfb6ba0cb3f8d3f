"""Data of users: files, their public schema, and the recipes that are made of them."""

from __future__ import annotations

from dpkfc.app.owndata.records import Records, split_records

__all__ = ["Records", "split_records"]
