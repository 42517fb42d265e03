"""Model families, a file each: how to read the configuration, what the parts are, where each weight goes."""
