"""What a peer has measured of itself and of its links, in the form that its record has."""
