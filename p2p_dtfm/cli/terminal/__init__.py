"""What commands show and write: the live view, bars, logs, files that somebody named.

For `commands` and `scenarios`. Begin with `progress`.
"""
