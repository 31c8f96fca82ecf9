"""``python -m specsim``."""

from specsim.cli import main

main()
