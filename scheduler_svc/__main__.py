"""`python -m scheduler_svc SETTINGS.json`."""

import sys

from scheduler_svc.main import main

sys.exit(main())
