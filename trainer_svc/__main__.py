"""`python -m trainer_svc SETTINGS.json`."""

from streamrl.service import end_process
from trainer_svc.main import main

end_process(main())
