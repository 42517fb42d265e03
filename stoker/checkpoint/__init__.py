"""Model files: find, download, check and convert them, so that the engine gets a folder in Hugging Face format."""
