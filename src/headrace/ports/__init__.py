"""The four ports of Headrace: clock, disk, network, coordination. Protocols and plain values only."""
