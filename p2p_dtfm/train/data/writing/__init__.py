"""The second reading, tokens into shards; it goes on where an interrupted one had got to.

`second_reading.write` is where to begin. Only `prepare` may import it.
"""
