"""Request -> workers: filter, score, choose and reserve in one step, with the reasons. Pure: the time is an argument."""
