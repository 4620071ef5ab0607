"""The built-in models, their problems, and the scripts that made them.

Without this file Python would prefer another package `models` on its path.
"""
