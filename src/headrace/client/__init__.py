"""A small synchronous client on blocking sockets: one connection per broker, leader routing, raw record sets."""
