"""KV between workers: leases, tickets, and the server and client that move blocks."""
