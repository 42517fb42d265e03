"""Compiled Triton kernels: where they are stored, the archive that ships with Stoker, and compiling ahead of their use."""
