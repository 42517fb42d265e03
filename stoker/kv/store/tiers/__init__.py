"""KV tiers: a folder or a file for each. A module here that registers a tier is found without another edit."""
