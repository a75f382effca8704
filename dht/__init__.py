"""Kademlia: the table of peers and signed records that lets a swarm find itself."""
