"""`stoker up`: starts a fleet on this machine, restarts processes that exit, and stops them in order.

A part is one supervised process of the fleet: the gateway, a worker, or a Mooncake master.
"""
