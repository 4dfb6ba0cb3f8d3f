"""What a person sees of a run: progress, privacy card, plots, run folder and the table of the doctor."""

from __future__ import annotations
