"""The API towards clients: the request body fields that the gateway reads, and the replies that it makes itself."""
