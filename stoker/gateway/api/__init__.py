"""The client's side of the API: request bodies as the gateway reads them, and its own replies."""
