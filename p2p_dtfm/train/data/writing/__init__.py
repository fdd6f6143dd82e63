"""The second reading, tokens into shards, which goes on where an interrupted one got to.

`second_reading.write` is where to begin. Only `prepare` may import it.
"""
