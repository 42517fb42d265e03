"""The path of a request: routes, proxy, dialects, retries, resume and rewriting."""
