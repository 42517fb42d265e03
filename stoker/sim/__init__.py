"""The simulator: the scheduler, block pool, router, fleet and admission of a real fleet on a virtual clock."""
