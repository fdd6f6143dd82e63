"""A plan as a picture: peers where they are, pipelines through them, how busy each link is.

Imports `scenario`. Begin with `plan_map`.
"""
