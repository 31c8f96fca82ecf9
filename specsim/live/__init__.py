"""Check a prediction on a running engine: load it, learn its step cost, predict, measure, compare.

Needs httpx (``pip install 'specsim[live]'``) where a server is asked; the rest of specsim does not.
"""
