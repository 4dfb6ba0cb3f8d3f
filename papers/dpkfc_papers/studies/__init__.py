"""Studies behind the tables of README and docs, which are not part of the installed package."""
