"""The built-in models, their problems, and the scripts that made them.

Python would prefer a package `models` from elsewhere on its path if this file were missing.
"""
