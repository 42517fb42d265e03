"""Mooncake's Transfer Engine and its master process, shared by the Mooncake tier and transport."""
