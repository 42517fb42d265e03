"""A model whose answers follow a script, for tests of clients and of long conversations (`script_folder.py`)."""
