"""Peers that train one model in stages, each of them a part of it: the network around `optim.swarm`."""
