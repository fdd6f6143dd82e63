"""The others: messages to and from them, how they are found and reached, what is told of oneself.

Imports `machine`. Begin with `wire` and `messenger`; `doctor` says what is wrong on the way.
"""
