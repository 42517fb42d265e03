"""The gateway: an OpenAI-compatible HTTP server that routes requests to workers, with hand-off, retries and metering."""
