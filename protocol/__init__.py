"""What peers say to each other: identity, secure channel, streams, rounds and collectives."""
