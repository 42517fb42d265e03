"""Words that everybody uses: errors, ids, clocks, registries, logs, configuration."""
