"""Own data of a user: tables, image folders, texts, and tasks of a module of their own."""

from __future__ import annotations
