"""Running engines: asked and compared with a prediction, or our own, which drives the simulator's schedulers for real.

Asking a server needs httpx (``pip install 'specsim[live]'``), our own engine torch; the rest of specsim needs neither.
"""
