"""The KV store: tiers below the device, written behind the engine and loaded when that is faster than computing."""
