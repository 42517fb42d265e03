"""This file puts tests/gateway on the import path, so that its sub-folders share world.py, mocks.py and the other helpers."""
