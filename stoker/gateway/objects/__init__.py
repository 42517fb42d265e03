"""Objects that tenants keep in the store: responses, files and batches."""
