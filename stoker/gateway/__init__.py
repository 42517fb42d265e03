"""The front door: OpenAI over HTTP in, HTTP to workers out; routing, hand-off, metering."""
