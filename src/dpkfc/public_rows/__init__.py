"""Public rows: what the checks before the first private row run on, and what they are like."""
