"""`python -m generator_svc`."""

import sys

from generator_svc.main import main

if __name__ == "__main__":
    sys.exit(main())
