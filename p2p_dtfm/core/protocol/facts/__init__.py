"""What a peer has measured of itself and of its links, as its record says it."""
