"""The application: from settings, recipes and data sets to runs, pictures, pages and tuning."""

from __future__ import annotations
