import sys

from weights_svc.main import main

sys.exit(main())
