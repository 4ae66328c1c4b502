"""`python -m scheduler_svc SETTINGS.json`."""

from scheduler_svc.main import main
from streamrl.service import end_process

end_process(main())
