from streamrl.service import end_process
from weights_svc.main import main

end_process(main())
