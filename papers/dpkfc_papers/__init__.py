"""Printed tables and figures of the papers, measured anew."""

from __future__ import annotations
