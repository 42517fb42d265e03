"""A file for each format of reasoning."""
