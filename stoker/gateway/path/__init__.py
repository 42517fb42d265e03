"""The path of a request through the gateway: URL routes, proxy, dialects, retries, resume and response rewriting."""
