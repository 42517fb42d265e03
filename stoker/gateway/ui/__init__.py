"""The dashboard: static files, and the endpoint that serves them."""
