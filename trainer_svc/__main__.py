"""`python -m trainer_svc SETTINGS.json`."""

import sys

from trainer_svc.main import main

sys.exit(main())
