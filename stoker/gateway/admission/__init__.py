"""Admission: API keys, rate limits, the fair queue, and the capacity of each model's workers."""
