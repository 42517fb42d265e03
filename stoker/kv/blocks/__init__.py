"""KV blocks: keys, ownership, layout and the types that describe a transfer. Light: never imports torch."""
