"""Being let into views, and leaving them: nobody is lost on the way, and nothing that only one has.

Begin with `entry`, which ends with the first view; `departure` is the other end.
"""
