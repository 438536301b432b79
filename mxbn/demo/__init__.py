"""The demonstration: ``python -m mxbn demo``."""
