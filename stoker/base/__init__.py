"""What all packages share: errors, ids, clocks, registries, logging and settings."""
