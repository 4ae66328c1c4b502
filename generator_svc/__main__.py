"""`python -m generator_svc`."""

import sys

if __name__ == "__main__":
    # Imported here only: every process of an engine imports this module again.
    from generator_svc.main import main

    sys.exit(main())
