"""Check the folder of a dpkfc run without dpkfc, PyTorch or dp-accounting."""
