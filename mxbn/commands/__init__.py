"""The commands of ``python -m mxbn`` that work on models."""
