"""Fakes for the four ports, all on one line of virtual time: clock and loop, disk, network, coordination."""
