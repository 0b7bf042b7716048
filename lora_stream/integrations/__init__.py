"""Drop-ins for frameworks that sync by themselves: their own calls go on, and get our stream.

Nothing here is imported by the rest of the package, and no framework is imported before its `patch()` is called.
"""
