"""Kademlia: the table of peers and signed records that lets a swarm find itself."""

from dht.ids import members_key
from dht.node import DHT, DhtSettings

__all__ = ["DHT", "DhtSettings", "members_key"]
