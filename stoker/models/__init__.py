"""Model families, one file each: how to read config.json, which parts to build, where each weight goes."""
