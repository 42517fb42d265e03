"""Durable state of the gateway: the store contract, its SQLite implementation, and the write-ahead slots."""
