"""Studies behind the tables of README and docs, which are no part of the installed package."""
