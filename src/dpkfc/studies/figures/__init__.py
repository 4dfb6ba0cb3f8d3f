"""The papers' figures, measured without the artefacts of the originals: values and functions, one measurement a module."""
