"""Cards, verification and the doctor."""
