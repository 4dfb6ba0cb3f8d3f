"""Checks of the promise: audits of the step that runs, and statistics that bound ε from below."""
