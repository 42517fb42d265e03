"""Convert text to token ids and back: tokenizer, chat templates, detokenizer, stop strings, parsers. No engine, no HTTP."""
