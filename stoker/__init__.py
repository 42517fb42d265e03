"""Stoker serves extra-large open-weight language models to agents, on your own GPUs."""

__version__ = "0.1.0"
